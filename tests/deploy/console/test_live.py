"""One reader serves any number of pages, and rests while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import msgspec
import pytest

from deploy.console import live as module
from deploy.console.live import PAGES_MAX, LiveMesh, as_server_sent, pause_s
from deploy.console.reader import MeshReader, NoMeshError
from deploy.console.snapshot import Snapshot
from deploy.local import live_view
from shared.contract.errors import UnavailableError
from shared.contract.ids import SequenceId
from shared.store.connections.redis_py import REPLY_TIMEOUT_S
from tests.deploy.console.readings import executor, reading, status


class Readings:
    """Stands for the reader."""

    def __init__(self) -> None:
        self.read_count = 0
        self.watched: set[SequenceId] = set()
        self.problem = ""

    async def read(self, watched: Collection[SequenceId] = ()) -> Snapshot:
        self.read_count += 1
        self.watched = set(watched)
        if self.problem:
            raise NoMeshError(self.problem)
        joined = [executor("a")] + [executor("b")] * (self.read_count > 1)
        return reading(1000 * self.read_count, *joined, sequences=(status(),))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    monkeypatch.setattr(module, "READ_EVERY_S", 0.001)
    monkeypatch.setattr(module, "LINGER_S", 0.01)
    return Readings()


def live_of(readings: Readings) -> LiveMesh:
    return LiveMesh(cast("MeshReader", readings), "0")


async def heard(page: module.Page, *kinds: str) -> dict[str, Any]:
    """The messages of a page until all of these kinds have come."""
    found: dict[str, Any] = {}
    async with asyncio.timeout(30):
        while not found.keys() >= set(kinds):
            found.update({kind: msgspec.json.decode(data) for kind, data in await page.take()})
    return found


async def test_nothing_is_read_while_nobody_looks(readings: Readings) -> None:
    live = live_of(readings)
    task = asyncio.create_task(live.run())

    await asyncio.sleep(0.05)
    assert 0 == readings.read_count
    with live.opened(None) as page:
        await heard(page, "begin", "view", "events")
    await asyncio.sleep(0.05)
    rested = readings.read_count
    await asyncio.sleep(0.05)

    assert rested == readings.read_count
    task.cancel()


async def test_pages_share_one_reading_and_each_hears_of_its_own_sequence(readings: Readings) -> None:
    live = live_of(readings)
    task = asyncio.create_task(live.run())
    name = status().sequence

    with live.opened(name) as one, live.opened(None) as other:
        story = (await heard(one, "begin", "view", "story"))["story"]
        views = await heard(other, "view")
        assert {name} == readings.watched

    assert "story" not in views
    assert ["began", "seen"] == [line["kind"] for line in story["lines"]]
    task.cancel()


async def test_a_page_that_reads_slowly_misses_readings_and_no_event(readings: Readings) -> None:
    live = live_of(readings)
    task = asyncio.create_task(live.run())

    with live.opened(None) as page:
        while readings.read_count < 20:
            await asyncio.sleep(0.001)
        taken = dict(await page.take())

    assert {"begin", "view", "events"} == set(taken)
    texts = [line["text"] for line in msgspec.json.decode(taken["events"])]
    assert texts[0].startswith("The console began to look")
    assert ["b joined the mesh"] == texts[1:]
    task.cancel()


async def test_a_mesh_that_cannot_be_read_is_told_once_and_read_again(readings: Readings) -> None:
    live = live_of(readings)
    readings.problem = "there is no mesh 'x' in this Redis yet"
    task = asyncio.create_task(live.run())

    with live.opened(None) as page:
        assert {"text": readings.problem} == (await heard(page, "problem"))["problem"]
        readings.problem = ""
        while True:
            found = await heard(page, "events")
            if "The mesh can be read again." in [line["text"] for line in found["events"]]:
                break
    task.cancel()


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.25, 2.5), (1.0, 8.0), (REPLY_TIMEOUT_S, 8.0)])
def test_a_reading_that_takes_long_is_followed_by_a_rest_in_which_no_page_takes_the_console_for_gone(
    took_s: float, rests_s: float
) -> None:
    """Behind a Redis that was silent for ten seconds the console was silent for a hundred."""
    assert rests_s == pause_s(took_s)
    assert took_s + rests_s < min(20, live_view.SILENCE_S)


def test_readings_of_an_ordinary_mesh_begin_every_second() -> None:
    assert pytest.approx(1) == 0.01 + pause_s(0.01)


async def test_pages_are_bounded(readings: Readings) -> None:
    live = live_of(readings)
    opened = [live.opened(None) for _ in range(PAGES_MAX + 1)]
    for one in opened[:-1]:
        one.__enter__()

    with pytest.raises(UnavailableError, match="pages of this console are open"):
        opened[-1].__enter__()
    opened[0].__exit__(None, None, None)
    with live.opened(None):
        assert PAGES_MAX == live.pages


def test_what_a_sequence_is_called_cannot_end_a_message_of_the_stream() -> None:
    data = msgspec.json.encode({"id": "a\n\nevent: view\ndata: {}\n\n"})

    assert [b"event: view", b"data: " + data, b"", b""] == as_server_sent([("view", data)]).split(b"\n")
