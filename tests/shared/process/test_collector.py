"""What a service is made of is not looked at by the collector, and what comes later is, seldom."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

import pytest

from shared.process import collector
from shared.process.collector import Collector

COLLECTED = """
import gc, weakref
import gateway.service
from shared.process import collector

class Ring:
    def __init__(self):
        self.itself = self

made = weakref.ref(Ring())
gc.disable()
before = gc.get_freeze_count()
collector.leave_what_stays()
print(before, gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000, made() is None)
later = weakref.ref(Ring())
collector.look_seldom()
print(gc.get_threshold()[0], later() is None, gc.collect() > 0, later() is None)
"""


def test_what_is_there_when_a_service_has_started_is_left_and_later_garbage_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], timeout=60, check=True, capture_output=True, text=True)

    assert ["0 True True True", "10000 False True True"] == done.stdout.splitlines()


def test_the_collector_rests_within_a_block_and_is_then_as_it_was() -> None:
    was_enabled = gc.isenabled()
    try:
        for enable in (gc.enable, gc.disable):
            enable()
            before = gc.isenabled()
            with collector.at_rest(), collector.at_rest():
                assert not gc.isenabled()
            assert before == gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each look."""
    found: list[int] = []

    def look() -> int:
        time.sleep(0.001)
        found.append(1)
        return 0

    monkeypatch.setattr(gc, "collect", look)
    return found


async def test_however_often_it_is_asked_it_looks_once_in_each_pause(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(asked: Collector, times: int) -> int:
        for _ in range(times):
            asked.look_soon()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return len(looks)

    monkeypatch.setattr(collector, "REST", 1_000_000)
    assert 1 == await ask(Collector(), 20)

    monkeypatch.setattr(collector, "REST", 0)
    assert 1 + 20 == await ask(Collector(), 20)


async def test_who_asks_during_the_pause_has_a_look_behind_it(looks: list[int]) -> None:
    asked = Collector()
    asked.look_soon()
    await asyncio.sleep(0)
    asked.look_soon()
    async with asyncio.timeout(60):
        while len(looks) < 2:
            await asyncio.sleep(0.001)
