"""`seqmesh analyze` on a real model: a short search, interrupted, and gone on with."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pytest
from click.testing import CliRunner

from deploy.analyze.command import Search, analyze, carried_out
from deploy.analyze.load import LoadPlan
from deploy.analyze.notes import FILE, Circumstances, Notes
from deploy.analyze.search import Bounds, Conclusion, Measured
from deploy.analyze.trials import fetch
from deploy.local.data_directory import ChildState, LauncherError, MeshState
from deploy.local.endings import EXIT_NOT_BEGUN, EXIT_TOO_SOON
from executor.configuration.load import load_model_config
from tests.mesh.model_repository import SAMPLES, add_sum_model
from tests.mesh.running_mesh import PATIENCE_S

QUICK = ["--concurrency=2", "--rounds=2", "--window-s=2", "--warmup-s=0.1", "--p99-ms=60000"]
"""A round without an answer is a problem of its configuration: so it is longer than a busy machine keeps a step."""
pytestmark = pytest.mark.timeout(300)


def test_a_search_that_is_interrupted_leaves_what_is_known_and_goes_on(tmp_path: Path) -> None:
    add_sum_model(tmp_path / "models", slots=4)
    model, output = tmp_path / "models" / "running_sum", tmp_path / "report"
    config = (model / "config.pbtxt").read_bytes()
    # A shell's background job ignores SIGINT, and so does what a test in it starts.
    program = ["env", "--default-signal=INT", sys.executable, "-m", "deploy.cli"]
    command = [*program, "analyze", str(model), f"--output={output}", *QUICK]
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            said.append(line)
            if line.startswith("trial 2 of"):
                os.killpg(running.pid, signal.SIGINT)
    assert 3 == running.returncode, "".join(said)

    # One, unless the machine was so busy that another one was over before the signal came.
    known = json.loads((output / FILE).read_text())["trials"]
    report = (output / "report.md").read_text()
    assert "The search was interrupted" in report
    assert "the given configuration" in report
    assert load_model_config(model, backends={"python": lambda text, _: text}).config.name == "running_sum"

    again = CliRunner().invoke(analyze, [str(model), f"--output={output}", *QUICK, f"--trials={len(known) + 1}"])

    assert 3 == again.exit_code, again.output
    assert f"going on with {len(known)} trials" in again.output
    notes = json.loads((output / FILE).read_text())
    *before, last = notes["trials"]
    assert known == before
    assert known
    assert last["steps_per_s"] > 0
    assert "the curve over 1 to 4 callers" in again.output
    # Its windows are short: on a busy machine one of them may be without an answer, and is no point.
    assert set() < {point["concurrency"] for point in notes["curve"]} <= {1, 2, 4}
    for name in ("trials.svg", "curve.svg"):
        assert (output / name).read_text().startswith("<svg")
    (model / "config.pbtxt").write_bytes((output / "config.pbtxt").read_bytes())
    chosen = load_model_config(model, backends={"python": lambda text, _: text}).config
    assert re.search(rf"\| chosen \| max_batch_size {chosen.max_batch_size},", (output / "report.md").read_text())
    # Its own folder was left alone, and other circumstances are refused.
    assert config != (output / "config.pbtxt").read_bytes()
    refused = CliRunner().invoke(analyze, [str(model), f"--output={output}", *QUICK])
    assert "another model, load or machine" in refused.output


def test_a_search_that_is_terminated_leaves_neither_files_nor_processes(tmp_path: Path) -> None:
    add_sum_model(tmp_path / "models", slots=4)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "deploy.cli", "analyze", str(tmp_path / "models" / "running_sum"), *QUICK]
    with subprocess.Popen(
        [*command, f"--output={tmp_path / 'report'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as running:
        assert running.stdout is not None
        while not list(temporary.glob("*/**/mesh.json")):
            assert running.poll() is None, running.stdout.read()
            time.sleep(0.05)
        started = psutil.Process(running.pid).children(recursive=True)
        running.terminate()
        said = running.stdout.read()

    assert "interrupted before anything was known" in said
    assert started
    assert [] == psutil.wait_procs(started, timeout=PATIENCE_S)[1]
    assert [] == list(temporary.iterdir())


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text("raise ValueError('it is broken')")
    (model / "config.pbtxt").write_text(
        (SAMPLES / "add_sub" / "config.pbtxt").read_text().replace('name: "add_sub"', "")
    )

    result = CliRunner().invoke(analyze, [str(model), f"--output={tmp_path / 'out'}", *QUICK])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "it is broken\n" in result.output
    assert f"cannot import {model / '1' / 'model.py'}: " in result.output
    assert "seqmesh-analyze-" not in result.output


@pytest.mark.parametrize("answered_per_s", [0.0, 1.0])
def test_a_given_configuration_that_serves_nothing_ends_the_search(tmp_path: Path, answered_per_s: float) -> None:
    """One of which some steps fail may be mended by another setting."""
    notes = Notes(Circumstances("", "", 1), {"name": "m", "max_batch_size": 4}, [])

    def measure(*_: object) -> list[Measured]:
        return [Measured(answered_per_s, problem="2 steps failed")]

    mesh: Any = SimpleNamespace(measure=measure)
    search = Search(mesh, [], LoadPlan(1, 1, 0.0, 1.0), Bounds(), 2, tmp_path, notes)

    if answered_per_s:
        assert Conclusion(search.start, complete=False) == search.run(print)
    else:
        with pytest.raises(LauncherError, match="serves nothing: 2 steps failed: give steps that the model takes"):
            search.run(print)
        assert [] == notes.trials


def test_a_gain_that_was_not_seen_again_is_not_chosen_where_the_curve_is_interrupted(tmp_path: Path) -> None:
    notes = Notes(Circumstances("", "", 1), {"name": "m", "max_batch_size": 4}, [])
    found = iter([100.0, 200.0, 100.0, 100.0])

    def measure(config: dict[str, Any], *_: object) -> list[Measured]:
        if (rate := next(found, None)) is None:
            raise KeyboardInterrupt
        return [Measured(rate)]

    mesh: Any = SimpleNamespace(measure=measure)
    search = Search(mesh, [], LoadPlan(1, 1, 0.0, 1.0), Bounds(), 2, tmp_path, notes)

    assert EXIT_TOO_SOON == carried_out(search, "m")

    assert "max_batch_size: 4\n" in (tmp_path / "config.pbtxt").read_text()
    assert "The search was interrupted" in (tmp_path / "report.md").read_text()


@contextmanager
def gateway_that_says(answer: bytes) -> Generator[tuple[MeshState, list[bytes]]]:
    """A mesh whose gateway answers one request so; and the first line of that request."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply() -> None:
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(65536).partition(b"\r\n")[0])
                connection.sendall(answer)

        gateway = ChildState("gateway-1", "gateway", 0, "", http_port=listening.getsockname()[1])
        replying = threading.Thread(target=reply)
        replying.start()
        yield MeshState(0, "127.0.0.1", "", ready=True, children=[gateway]), asked
        replying.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", b"nonsense\r\n\r\n"])
def test_a_gateway_that_does_not_answer_is_what_is_wrong_with_its_trial(answer: bytes) -> None:
    """It ended the whole search, as a fault of the command."""
    with gateway_that_says(answer) as (mesh, _), pytest.raises(LauncherError, match="the mesh does not answer"):
        fetch(mesh, "m", "/stats")


def test_a_model_may_be_called_as_its_folder_can() -> None:
    with gateway_that_says(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (mesh, asked):
        assert {} == fetch(mesh, "my model #1", "/config")

    assert [b"GET /v2/models/my%20model%20%231/config HTTP/1.1"] == asked


def test_a_repository_in_the_place_of_a_model_is_told_with_its_models() -> None:
    result = CliRunner().invoke(analyze, [str(SAMPLES)])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert f"{SAMPLES} is a repository: give one of its models, add_sub, row_norms, " in result.output


def test_a_search_that_begins_anew_forgets_measurements_and_removes_nothing_else(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "none of these"')
    measurements, mine = tmp_path / FILE, tmp_path / "mine.txt"
    for file in (measurements, mine):
        file.write_text("no measurements")

    result = CliRunner().invoke(analyze, [str(model), f"--output={tmp_path}", "--anew", *QUICK])

    assert "failed to load" in result.output
    assert mine.exists()
    assert (model / "config.pbtxt").exists()
    assert not measurements.exists()


def test_an_output_that_cannot_be_made_is_told_before_anything_runs() -> None:
    result = CliRunner().invoke(analyze, [str(SAMPLES / "add_sub"), "--output=/proc/nope"])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "/proc/nope cannot be made" in result.output


def test_a_model_that_cannot_be_copied_is_told(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.py").symlink_to(tmp_path / "nowhere")

    result = CliRunner().invoke(analyze, [str(model), f"--output={tmp_path / 'out'}"])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert f"{model} cannot be copied: [Errno 2] No such file or directory: '{model / 'model.py'}'" in result.output


@pytest.mark.parametrize("words", [[], ["--output=report"]])
def test_a_report_is_not_written_into_the_folder_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(analyze, [".", *words])

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "is in the model's folder" in result.output
    assert [] == list(tmp_path.iterdir())


def test_data_that_is_no_text_is_refused_as_a_wrong_form(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(b"\xff")
    words = [str(SAMPLES / "add_sub"), f"--input-data={tmp_path / 'data.json'}", f"--output={tmp_path / 'out'}"]

    result = CliRunner().invoke(analyze, words)

    assert EXIT_NOT_BEGUN == result.exit_code
    assert "not in the form of perf_analyzer" in result.output


def test_a_shape_beside_given_inputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"data": [{"X": [1]}]}')

    result = CliRunner().invoke(
        analyze, [str(SAMPLES / "add_sub"), "--shape=X:3", f"--input-data={tmp_path / 'data.json'}"]
    )

    assert click.UsageError.exit_code == result.exit_code
    assert "--shape is for inputs that are made" in result.output


@pytest.mark.parametrize("sizes", ["a", "-3", "3,-1", ""])
def test_shapes_are_read(sizes: str) -> None:
    result = CliRunner().invoke(analyze, [str(SAMPLES / "add_sub"), f"--shape=X:{sizes}"])

    assert click.UsageError.exit_code == result.exit_code
    assert "write NAME:3,4" in result.output
