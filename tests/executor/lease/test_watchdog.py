"""An executor that stood still for longer than its lease says what held it up."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor.engine.base import BatchResult, Row, Timings
from executor.lease.watchdog import REMEDY, Watchdog, blocking_instances
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex

LIMIT_S = 0.1


class Greedy:
    """An engine whose call keeps the interpreter's lock for several times the limit, of processor time."""

    def __init__(self) -> None:
        before_s = time.thread_time()
        sum(range(1_000_000))
        self._count = int(5 * LIMIT_S / (time.thread_time() - before_s) * 1_000_000)

    def run(self, rows: Any, want_state: Any) -> BatchResult:
        sum(range(self._count))  # one call, in C
        return BatchResult([None], Timings(0, 0, 0))

    def close(self) -> None: ...


def worker(latest_call_s: float) -> EngineWorker:
    return cast("EngineWorker", SimpleNamespace(name=f"took {latest_call_s}", latest_call_s=latest_call_s))


async def test_a_call_that_keeps_the_interpreter_is_named_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    greedy: Any = Greedy()
    calls = EngineWorker(greedy, "sum", "sum_0_0", InstanceIndex(0))
    watchdog = Watchdog(LIMIT_S, lambda: [calls])

    def told() -> list[logging.LogRecord]:
        # A busy machine can hold the loop up, too.
        return [record for record in caplog.records if record.levelno == logging.ERROR]

    async def run() -> None:
        await calls.run([Row(inputs={}, null=True)], [False])

    async with asyncio.timeout(60):
        while not told():
            running = asyncio.create_task(run())
            await watchdog.sleep(LIMIT_S / 6)
            await running
    await calls.close()

    (record,) = told()
    assert "model held the interpreter for longer than the lease" == record.message
    fields = cast("dict[str, Any]", vars(record)["fields"])
    assert (["sum_0_0"], REMEDY) == (fields["instances"], fields["remedy"])
    assert fields["cpu_seconds"] >= LIMIT_S


@pytest.mark.parametrize(
    ("cpu_s", "calls_s", "expected"),
    [
        (3.1, [3.0, 0.2, 40.0], ["took 3.0", "took 40.0"]),
        (0.1, [3.0], []),
        (9.0, [2.9], []),
        (3.0, [], []),
    ],
)
def test_a_process_that_was_frozen_or_whose_models_were_quick_was_held_up_by_none(
    cpu_s: float, calls_s: list[float], expected: list[str]
) -> None:
    assert expected == blocking_instances([worker(call_s) for call_s in calls_s], cpu_s, limit_s=3.0)
