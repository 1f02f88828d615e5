"""The README's programs work as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mesh.running_mesh import RunningMesh

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
TIMEOUT_S = 60


def run(program: str, mesh: RunningMesh) -> str:
    """What a README program prints; the only thing changed is the address."""
    here = program.replace("localhost:8000", mesh.http()).replace("localhost:8001", mesh.grpc())
    assert here != program
    finished = subprocess.run(
        [sys.executable, "-c", here], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_two_texts_go_on_without_state_in_the_client(mesh: RunningMesh) -> None:
    """Interleaved or one after the other: each text's predictions are its own."""
    lines = run(PROGRAMS[0], mesh).splitlines()

    assert 6 == len(lines)
    in_turn = run(re.sub(r"send\(2.*\n", "", PROGRAMS[0]), mesh).splitlines()
    assert [line for line in lines if line.startswith("1 ")] == in_turn


def test_a_stream_adds_up(mesh: RunningMesh) -> None:
    assert "[3, 7, 12]\n" == run(PROGRAMS[1], mesh)


@pytest.mark.parametrize("path", re.findall(r"`((?:tests|shared|deploy)/[\w/.]+)`", (ROOT / "README.md").read_text()))
def test_every_file_that_the_readme_names_exists(path: str) -> None:
    assert (ROOT / path).exists()
