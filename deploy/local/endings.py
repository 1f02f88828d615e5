"""How a command ends: in order, with an exit code that says what it is, also where its output cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

import click

from deploy.local.terminal import show

EXIT_NOT_BEGUN, EXIT_TOO_SOON = 2, 3
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Why an open file cannot be written. That of standard output, above all; EPIPE: its reader has gone."""


class NotBegunError(click.ClickException):
    """There is no verdict; the message says why."""

    exit_code = EXIT_NOT_BEGUN


def stop_signals() -> list[signal.Signals]:
    """What stops a mesh in order. SIGHUP says that the terminal was closed, unless `nohup` has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextmanager
def terminated_as_interrupted() -> Generator[None]:
    """Within the block what stops a mesh does what Ctrl-C does, so that meshes and files do not outlive the command.
    SIGINT itself is left alone: a shell has a command in the background ignore it.
    """
    before = {one: signal.signal(one, signal.default_int_handler) for one in stop_signals() if one != signal.SIGINT}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def ending_by_verdict() -> Generator[None]:
    """As `errors_apart`. Besides, Ctrl-C and SIGTERM, where the block itself does not take them, end the command with
    EXIT_TOO_SOON.
    """
    try:
        with terminated_as_interrupted(), errors_apart():
            yield
    except KeyboardInterrupt:
        show("Error: interrupted before anything was known", sys.stderr)
        raise SystemExit(EXIT_TOO_SOON) from None


@contextmanager
def errors_apart() -> Generator[None]:
    """For a command whose exit code 1 is a verdict. An error, also of a file, a full disk, a reader that has gone or
    the command itself, ends it with EXIT_NOT_BEGUN.
    """
    try:
        yield
    except (click.UsageError, click.exceptions.Exit, NotBegunError):
        raise
    except click.ClickException as error:
        raise NotBegunError(error.message) from error
    except OSError as error:
        if error.filename is not None:
            raise NotBegunError(unusable(error)) from error
        if isinstance(error, FileNotFoundError):
            raise NotBegunError(absent(error)) from error
        if error.errno not in UNWRITABLE:
            raise NotBegunError(unexpected(error)) from error
        if error.errno != errno.EPIPE:
            show(f"Error: the results cannot be written: {error.strerror}", sys.stderr)
        raise SystemExit(EXIT_NOT_BEGUN) from error
    except Exception as error:
        # Python's own exit code for it would be a verdict.
        raise NotBegunError(unexpected(error)) from error


@contextmanager
def importing(extras: str) -> Generator[None]:
    """For imports of what only some commands need: images and installations of single services lack it. Raises
    click.ClickException for a package that is missing. extras: those of this distribution that bring it
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        # tritonclient makes a RuntimeError of it.
        missing = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(missing, ModuleNotFoundError):
            raise
        remedy = f"pip install 'seqmesh[{extras}]', or run it where that was done"
        raise click.ClickException(f"this needs {missing.name}, which is not installed here: {remedy}") from error


def unusable(error: OSError) -> str:
    """What is said of an error that names a file: of a copy, the file that is written."""
    return f"{error.filename2 or error.filename} cannot be read or written: {error.strerror}"


def absent(error: FileNotFoundError) -> str:
    """What an error of a missing file means that names no file. Python has words of its own where no temporary
    directory is usable.
    """
    is_gone = error.strerror == os.strerror(errno.ENOENT)
    return "the working directory has been removed: change to another one" if is_gone else str(error.strerror)


def unexpected(error: Exception) -> str:
    """What is said of an error that nobody has foreseen: what a report of it needs."""
    return f"there is no verdict, because of a fault in this command\n{''.join(traceback.format_exception(error))}"


def prepare_streams() -> None:
    """Lets standard streams that were closed (`>&-`) lead nowhere: Python has none then, and the next file or
    connection would take the place of one, and get what is written there.

    What standard output cannot encode becomes an escape, as on standard error: names of files and sequences are given.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 -- as long as the process
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_unwritten() -> None:
    """Drops what standard output and standard error cannot write: it would fail once more when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def results_in(folder: Path) -> Generator[None]:
    """Makes a folder for results, unless it is there, and keeps other runs out of it; removes it if nothing is in it
    after the block.

    raises  click.UsageError if it cannot be made, or another run has it
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise click.UsageError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise click.UsageError(f"another run writes into {folder}: wait for its end, or give another folder") from None
    try:
        yield
    finally:
        os.close(lock)
        with suppress(OSError):  # it is not empty
            folder.rmdir()
