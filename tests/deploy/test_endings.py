"""Commands whose exit code 1 is a verdict end with another one when there is none."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deploy.chaos.command import chaos
from deploy.local.data_directory import LauncherError
from deploy.local.endings import EXIT_NOT_BEGUN, EXIT_TOO_SOON, ending_by_verdict, errors_apart, results_in


@pytest.fixture
def interruptible() -> Iterator[None]:
    """The usual handlers. A shell has a command that it runs in the background ignore SIGINT, and `nohup` SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for one, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(one, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_interrupted_or_terminated_ends_in_order_and_too_soon(by: signal.Signals) -> None:
    cleared: list[str] = []
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]

    @click.command
    @ending_by_verdict()
    def command() -> None:
        try:
            os.kill(os.getpid(), by)
        finally:
            cleared.append("mesh")

    result = CliRunner().invoke(command, [])

    assert EXIT_TOO_SOON == result.exit_code
    assert ["mesh"] == cleared
    assert "interrupted before anything was known" in result.output
    assert before == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]


def oserror(number: int, *names: str | None) -> OSError:
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LauncherError("the mesh ended"), "Error: the mesh ended\n"),
        (oserror(errno.EACCES, "config.pbtxt"), "Error: config.pbtxt cannot be read or written: Permission denied\n"),
        # Of a copy that has no room the file is told that lacks it: the one that is copied has room enough.
        (
            oserror(errno.ENOSPC, "model.py", None, "results/model.py"),
            "Error: results/model.py cannot be read or written: No space left on device\n",
        ),
        (oserror(errno.ENOSPC), "Error: the results cannot be written: No space left on device\n"),
        # A reader that has gone hears nothing.
        (oserror(errno.EPIPE), ""),
    ],
)
def test_an_error_is_no_verdict(error: Exception, told: str) -> None:
    @click.command
    @ending_by_verdict()
    def command() -> None:
        raise error

    result = CliRunner().invoke(command, [])

    assert (EXIT_NOT_BEGUN, told) == (result.exit_code, result.output)


def test_a_fault_of_the_command_is_no_verdict_and_says_where_it_is() -> None:
    @click.command
    @ending_by_verdict()
    def command() -> None:
        raise ZeroDivisionError("of the plan")

    result = CliRunner().invoke(command, [])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "a fault in this command\nTraceback" in result.output
    assert "ZeroDivisionError: of the plan" in result.output


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_verdict_stays_what_it_is(code: int) -> None:
    @click.command
    @click.pass_context
    @errors_apart()
    def command(ctx: click.Context) -> None:
        ctx.exit(code)

    assert code == CliRunner().invoke(command, []).exit_code


def test_chaos_says_where_its_results_cannot_go() -> None:
    result = CliRunner().invoke(chaos, ["--out", "/proc/nope"])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "/proc/nope cannot be made" in result.output


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "results"

    with results_in(folder):
        with (
            pytest.raises(click.UsageError, match=r"another run writes into .*results: wait for its end"),
            results_in(folder),
        ):
            pass
        (folder / "report.md").touch()
    with results_in(folder):
        pass


@pytest.mark.parametrize(("written", "left"), [([], []), (["report.md"], ["results"])])
def test_a_command_that_fails_leaves_no_empty_folder(tmp_path: Path, written: list[str], left: list[str]) -> None:
    folder = tmp_path / "results"

    with results_in(folder):
        for name in written:
            (folder / name).touch()

    assert left == [found.name for found in tmp_path.iterdir()]
