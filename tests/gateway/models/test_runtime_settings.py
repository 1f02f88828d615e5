"""Log and trace settings for clients: what many of them ask for at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.models import runtime_settings
from gateway.models.catalog import Catalog
from gateway.models.runtime_settings import RuntimeSettings
from shared.process import log_settings
from shared.process.logs import Level
from shared.stored_settings import ChangedSettings, ProcessSettings
from shared.traces.context import Sampler
from shared.traces.control import TraceControl


class Stored:
    """Settings in Redis, of which a read takes until the test says so."""

    def __init__(self) -> None:
        self.reads = self.changes = 0
        self.go_on = asyncio.Event()

    async def read(self) -> ChangedSettings:
        self.reads += 1
        await self.go_on.wait()
        return ChangedSettings()

    async def change_logs(self, changes: log_settings.Changes, by: str) -> None:
        self.changes += 1


def settings_of(stored: Any) -> RuntimeSettings:
    control = TraceControl(Sampler(), exporting=True)
    process = ProcessSettings(stored, control, Level.INFO)
    return RuntimeSettings(stored, process, control, cast("Catalog", None), "gateway")


async def test_clients_that_ask_at_once_wait_for_two_reads_and_not_for_each_other() -> None:
    stored = Stored()
    settings = settings_of(stored)
    asking = [asyncio.create_task(settings.logs({}, "", "a"))]
    while not stored.reads:
        await asyncio.sleep(0)
    asking += [asyncio.create_task(settings.traces("", {}, "", "a")) for _ in range(20)]
    await asyncio.sleep(0)
    stored.go_on.set()
    await asyncio.wait(asking)

    assert 2 == stored.reads


async def test_changes_take_turns_and_who_asks_waits_for_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_settings, "PAUSE_S", 0)
    stored, ended = Stored(), list[str]()
    settings = settings_of(stored)

    async def end(name: str, changes: log_settings.Changes) -> None:
        await settings.logs(changes, "", "a")
        ended.append(name)

    changing = [asyncio.create_task(end("change", {"log_info": True})) for _ in range(20)]
    while not stored.reads:
        await asyncio.sleep(0)
    asking = asyncio.create_task(end("ask", {}))
    await asyncio.sleep(0)
    assert 1 == stored.changes

    stored.go_on.set()
    await asyncio.wait([*changing, asking])

    assert 20 == stored.changes
    assert ended.index("ask") < 3


async def test_between_two_changes_there_is_a_pause_and_the_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves a line in every log."""
    stored, pauses, ended = Stored(), list[float](), list[str]()
    stored.go_on.set()
    settings = settings_of(stored)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 7.0)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def change(name: str) -> None:
        await settings.logs({"log_info": True}, name, name[0])
        ended.append(name)

    monkeypatch.setattr(asyncio, "sleep", pause)
    await asyncio.gather(*map(change, ("a0", "a1", "a2", "a3", "b0")))

    assert ["a0", "a1", "b0", "a2", "a3"] == ended
    assert [runtime_settings.PAUSE_S] * 4 == pytest.approx(pauses[1:])
    assert pauses[0] < 0
