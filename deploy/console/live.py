"""One reader for any number of pages.

Each page has a mailbox with room for the latest message of each kind: a page that reads slowly misses readings, and
holds nobody up. While there is no page, nothing is read. A reading that takes long is followed by a longer pause
(`pause_s`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import msgspec

from deploy.console.events import BAD, GOOD, EventLog, MeshNews
from deploy.console.history import RANGES, ChartHistory, ChartPoint, Subject, grown, moments_between
from deploy.console.reader import MeshReader
from deploy.console.snapshot import Snapshot
from deploy.console.stories import Stories
from deploy.console.view import MeshView, mesh_view, watched_view
from shared.contract.errors import MeshError, UnavailableError
from shared.contract.ids import SequenceId
from shared.process import logs
from shared.store.connections.redis_py import LOST_OR_REFUSED

PAGES_MAX = 64
READ_EVERY_S = 1.0
SHARE_OF_TIME = 10
"""The pause after a reading is so many times what the reading took: readings take a tenth of the time at most."""
PAUSE_MAX_S = 8.0
"""But no longer than this. A Redis that does not answer makes one reading last for ten seconds, and what comes behind
that must be seen; a page takes a console for gone that says nothing for twenty."""
LINGER_S = 5.0
"""How long readings go on without a page: one that is loaded anew goes on where it was."""

encode = msgspec.json.encode


class Begin(msgspec.Struct, frozen=True):
    """The first message to a page: what was seen so far, and how often it will hear."""

    events: list[MeshNews]
    every_ms: int
    can_kill: bool
    release: str


class Chart(msgspec.Struct, frozen=True):
    """What the charts of a page show when it is opened. every_ms: the time that one point stands for"""

    every_ms: int
    points: list[ChartPoint]


class Page:
    """One page that is open. watches: the sequence whose story it shows; charts: subject and range of its charts"""

    def __init__(self, watches: SequenceId | None, charts: tuple[Subject, str] | None) -> None:
        self.watches = watches
        self.charts = charts
        self._waiting: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._offered = 0
        self.heard = 0
        """The number of the last event that this page has taken."""

    def put(self, kind: str, message: bytes) -> None:
        """Replaces what waits of that kind."""
        self._waiting[kind] = message
        self._news.set()

    def offer(self, events: Sequence[MeshNews]) -> None:
        """Replaces the events that wait: all that the page has not taken, so that it misses none with a reading."""
        if events:
            self._offered = events[-1].number
            self.put("events", encode(events))

    async def take(self) -> list[tuple[str, bytes]]:
        """What has come since the last call; waits for something."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._waiting.items())
        self._waiting.clear()
        self.heard = max(self.heard, self._offered)
        return taken


class LiveMesh:
    """Reads while somebody looks, and tells all pages.

    killable  names of executors that the launcher can kill
    """

    def __init__(self, reader: MeshReader, release: str, killable: frozenset[str] = frozenset()) -> None:
        self._reader = reader
        self._release = release
        self._killable = killable
        self._pages: set[Page] = set()
        self._somebody = asyncio.Event()
        self._before: Snapshot | None = None
        self._stories = Stories()
        self._events = EventLog()
        self._history = ChartHistory()
        self._problem = ""

    @property
    def pages(self) -> int:
        return len(self._pages)

    @contextmanager
    def opened(self, watches: SequenceId | None = None, charts: tuple[Subject, str] | None = None) -> Generator[Page]:
        """A page, for the block. Raises UnavailableError if too many are open. Arguments: see `Page`"""
        if len(self._pages) >= PAGES_MAX:
            raise UnavailableError(f"{PAGES_MAX} pages of this console are open, and no more are served: close one")
        page = Page(watches, charts)
        begin = Begin(self._events.lines, round(READ_EVERY_S * 1000), bool(self._killable), self._release)
        page.put("begin", encode(begin))
        if charts is not None:
            page.put("chart", encode(Chart(RANGES[charts[1]], self._history.points(*charts))))
        page.heard = self._events.last
        self._pages.add(page)
        self._somebody.set()
        try:
            yield page
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._somebody.clear()

    def tell(self, tone: str, text: str) -> None:
        """Adds a line of the console's own to the log."""
        self._events.add(time.time_ns() // 1_000_000, tone, text)

    async def run(self) -> None:
        """Reads for ever, while there are pages."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_somebody()
            began = loop.time()
            await self._read()
            await asyncio.sleep(pause_s(loop.time() - began))

    async def _wait_for_somebody(self) -> None:
        if self._somebody.is_set():
            return
        try:
            async with asyncio.timeout(LINGER_S if self._before is not None else None):
                await self._somebody.wait()
        except TimeoutError:
            await self._somebody.wait()
            # Nobody has looked meanwhile: the difference to the last reading would not be news.
            self._before = None

    async def _read(self) -> None:
        try:
            now = await self._reader.read({page.watches for page in self._pages if page.watches is not None})
        except (*LOST_OR_REFUSED, MeshError) as failure:
            self._has_problem(failure.message if isinstance(failure, MeshError) else f"Redis cannot be read: {failure}")
            return
        if self._problem:
            self._problem = ""
            self._events.add(now.at_ms, GOOD, "The mesh can be read again.")
        before, self._before = self._before, now
        self._events.see(before, now)
        self._stories.see(now)
        since = grown(before, now)
        moments = moments_between(before, now, since)
        self._history.add(moments)
        self._send(mesh_view(now, since, moments, self._stories, killable=self._killable), now)

    def _send(self, view: MeshView, now: Snapshot) -> None:
        encoded = encode(view)
        stories: dict[SequenceId, bytes] = {}
        for page in self._pages:
            page.put("view", encoded)
            page.offer(self._events.since(page.heard))
            if page.charts is not None and (point := self._history.latest(*page.charts)) is not None:
                page.put("point", encode(point))
            if page.watches is not None:
                if page.watches not in stories:
                    stories[page.watches] = encode(
                        watched_view(now.watched.get(page.watches), self._stories.of(page.watches))
                    )
                page.put("story", stories[page.watches])

    def _has_problem(self, text: str) -> None:
        if text != self._problem:
            logs.warning("mesh not read", cause=text)
            if not self._problem:
                self.tell(BAD, text)
            self._problem = text
        for page in self._pages:
            page.put("problem", encode({"text": text}))


def pause_s(took_s: float) -> float:
    """The pause after a reading that took so long."""
    return min(max(READ_EVERY_S - took_s, took_s * SHARE_OF_TIME), PAUSE_MAX_S)


def as_server_sent(messages: Sequence[tuple[str, bytes]]) -> bytes:
    """Messages in the form of an event stream. Their JSON has no line ends."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (kind.encode(), data) for kind, data in messages)
