"""What the program that measures the scripts tells."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scripts import report
from shared.store import libraries
from tests.embedded_redis import EmbeddedRedis


async def test_both_scripts_are_measured_with_one_and_with_many_steps_a_call(private_server: EmbeddedRedis) -> None:
    head, *rows = (await report(private_server.url, Path(str(libraries.LUA)), 1)).splitlines()

    assert head.split() == [
        "client", "a", "call", "submit", "ours", "submit", "theirs", "submit", "ratio",
        "commit", "ours", "commit", "theirs", "commit", "ratio",
    ]  # fmt: skip
    assert [row.split()[:2] for row in rows] == [
        [client, steps] for client in ("plain", "named", "numbered") for steps in ("1", "4", "8")
    ]
    assert all(float(figure) > 0 for row in rows for figure in row.split()[2:])
