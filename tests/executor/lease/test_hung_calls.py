"""Calls that do not come back, told by looks."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from executor.engine.base import BatchResult
from executor.lease.hung_calls import HungCalls, place_of, watch
from executor.workers.worker import EngineCall, EngineWorker
from shared.contract.ids import InstanceIndex
from tests.executor.patience import until


def test_a_call_has_hung_when_too_many_looks_have_seen_it() -> None:
    calls = HungCalls(looks_max=2)
    slow, other = EngineCall("slow", 1), EngineCall("other", 2)

    assert [None, None, slow] == [calls.look([slow]), calls.look([other, slow]), calls.look([slow])]


def test_calls_that_come_back_in_time_have_not_hung_however_many_there_are() -> None:
    calls = HungCalls(looks_max=2)

    for _ in range(10):
        call = EngineCall("busy", 1)
        assert [None, None] == [calls.look([call]) for _ in range(2)]
    assert calls.look([]) is None


class Stuck:
    """An engine whose batch ends when it is told to."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def run(self, *_: object) -> BatchResult:
        self.told.wait()
        raise RuntimeError("told")


async def test_a_batch_that_does_not_end_is_found_and_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model has put something of its own in the place of standard error."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    # Else a test's process that stands still for a tenth of a second would end.
    monkeypatch.setattr("executor.lease.hung_calls.HELD_UP_LIMITS", 10_000)
    engine = Stuck()
    worker = EngineWorker(engine, "m", "m instance", InstanceIndex(0))  # pyright: ignore[reportArgumentType]
    batch = worker.run([], [])
    try:
        call = await watch(lambda: [worker], 0.05)
        assert "m instance" == call.worker
        # Its thread may be on its way there.
        await until(lambda: "threading.py" in place_of(call))
    finally:
        engine.told.set()
        await batch
    assert worker.running is None
    assert "unknown" == place_of(EngineCall("m", time.time_ns()))
