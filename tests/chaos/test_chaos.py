"""`seqmesh chaos` on a mesh of its own: a few faults of every sort, and nothing lost, doubled or reordered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deploy.chaos.command import Document

KINDS = "kill-executor,kill-gateway,kill-redis,freeze-executor,cut-redis-links,cut-client-links,drop-clients,fill-slots"


@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    """A finding names the step; `seqmesh chaos --seed 4 ...` as the report says repeats the plan."""
    command = ["--seed", "4", "--steps", "600", "--faults", "8", "--clients", "24", "--minutes", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "chaos", *command, "--kinds", KINDS, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    document = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Document)
    assert document.report.verdict == "whole"
    assert {strike.kind for strike in document.strikes} == set(KINDS.split(","))
    assert document.report.attempts["answered"] >= document.report.steps >= 600
    assert sum(document.report.attempts.values()) > document.report.steps, "steps were sent again"
    assert "appendfsync always" in document.report.about["redis"]
    assert (tmp_path / "timeline.png").exists()
    assert (tmp_path / "report.md").read_text() in done.stdout
