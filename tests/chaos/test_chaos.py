"""`seqmesh chaos` on a mesh of its own: a few faults of every sort, and nothing lost, doubled or reordered.

`make chaos` has four times the clients, and five times the faults. Here few clients do: they never pause, and a fault
takes seconds, so each client more costs a core's time and adds no kind of fault.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deploy.chaos.command import Document

KINDS = (
    "kill-executor,kill-gateway,kill-redis,kill-instance,freeze-executor,cut-redis-links,cut-client-links,drop-clients,"
    "fill-slots"
)
FAILOVERS = "kill-executor,kill-redis,freeze-redis,promote-replica"


def run_chaos(out: Path, kinds: str, *options: str) -> tuple[Document, str]:
    """What a run has left, and what it has said. It must have been whole, and the faults of every kind."""
    command = [sys.executable, "-m", "deploy.cli", "chaos", "--kinds", kinds, "--out", str(out), "--minutes", "8"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    document = msgspec.json.decode((out / "report.json").read_bytes(), type=Document)
    assert document.report.verdict == "whole"
    assert {strike.kind for strike in document.strikes} == set(kinds.split(","))
    return document, done.stdout


@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    """A finding names the step; `seqmesh chaos --seed 4 ...` as the report says repeats the plan."""
    options = ["--seed", "4", "--steps", "600", "--faults", "9", "--clients", "12", "--lease-ms", "1000"]
    document, said = run_chaos(tmp_path, KINDS, *options)

    assert document.report.attempts["answered"] >= document.report.steps >= 600
    assert sum(document.report.attempts.values()) > document.report.steps, "steps were sent again"
    assert "appendfsync always" in document.report.about["redis"]
    assert (tmp_path / "report.md").read_text() in said


@pytest.mark.timeout(600)
def test_nothing_is_lost_while_redis_fails_over_but_what_a_stale_replica_lacks_and_that_is_told(tmp_path: Path) -> None:
    # With the lease goes the time after which Sentinels replace a primary: on a busy machine one second is none.
    options = ["--seed", "7", "--steps", "400", "--faults", "4", "--clients", "8", "--sentinels"]
    document, _ = run_chaos(tmp_path, FAILOVERS, *options)

    assert "three Sentinels" in document.report.about["redis"]


@pytest.mark.timeout(600)
def test_nothing_is_lost_while_nodes_of_a_cluster_are_killed_and_replaced(tmp_path: Path) -> None:
    options = ["--seed", "7", "--steps", "400", "--faults", "3", "--clients", "8", "--cluster"]
    document, _ = run_chaos(tmp_path, "kill-redis,freeze-redis,restart-redis", *options)

    assert "a Cluster of three primaries" in document.report.about["redis"]
