"""The live view of `seqmesh up`: a few lines at the foot of a terminal that show the mesh, below the messages.

It shows what the console tells its pages (`deploy/console/live.py`), as one more of them: one place reads the mesh.
`MeshLines` makes lines of what it is told, and knows no connection. `shown` draws it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.local.terminal import is_read, printable

EXECUTORS_SHOWN = 8
NEWS_SHOWN = 3
BAR_COLUMNS = 16
RECENT_BATCHES = 12
BLOCKS = "▁▂▃▄▅▆▇█"
RETRY_S = 1.0
SILENCE_S = 30.0
"""After so long without a message the stream is opened anew: the console tells at least one a second."""
TONES = {"good": "green", "note": "default", "warn": "yellow", "bad": "red"}
STATES = {"serving": "green", "closing": "yellow", "leaving": "yellow"}
"""How an executor's state is coloured; red for one that is dead."""


class ModelOnExecutor(msgspec.Struct, frozen=True):
    """Of the console's `ServedView`. held: sequences; pending: requests; batches: rows of the latest ones"""

    held: int
    pending: int
    batches: tuple[int, ...]


class ExecutorLine(msgspec.Struct, frozen=True):
    """Of the console's `ExecutorView`."""

    name: str
    state: str
    models: tuple[ModelOnExecutor, ...]

    @property
    def held(self) -> int:
        return sum(each.held for each in self.models)

    @property
    def pending(self) -> int:
        return sum(each.pending for each in self.models)

    @property
    def batches(self) -> Sequence[int]:
        """Of the model that has run most of late."""
        return max((each.batches for each in self.models), key=len, default=())


class MeshFigures(msgspec.Struct, frozen=True):
    """Of the console's `ChartPoint`. Means, -1 over nothing."""

    steps_per_s: float
    failed_per_s: float
    request_ms: float
    batch: float
    live: int
    waiting: int


class MeshSeen(msgspec.Struct, frozen=True):
    """Of the console's `MeshView`."""

    executors: tuple[ExecutorLine, ...]
    point: MeshFigures


class NewsSeen(msgspec.Struct, frozen=True):
    """Of the console's `MeshNews`."""

    number: int
    at_ms: int
    tone: str
    text: str


class ProblemSeen(msgspec.Struct, frozen=True):
    """Why the console cannot read the mesh."""

    text: str


class MeshLines:
    """The lines. `take` is given each message of the console's stream, `problem` says why there are none."""

    def __init__(self) -> None:
        self._seen: MeshSeen | None = None
        self._news = deque[NewsSeen](maxlen=NEWS_SHOWN)
        self._last_news = 0
        self.problem = "waiting for the console"

    def take(self, kind: str, data: bytes) -> None:
        """A message of the stream. Raises msgspec.DecodeError for one that another release would write."""
        if kind == "begin":
            self._last_news = 0  # of a console that was started again, whose numbers begin anew
        elif kind == "view":
            self._seen = msgspec.json.decode(data, type=MeshSeen)
            self.problem = ""
        elif kind == "events":
            self._hear(msgspec.json.decode(data, type=list[NewsSeen]))
        elif kind == "problem":
            self.problem = msgspec.json.decode(data, type=ProblemSeen).text

    def _hear(self, news: Sequence[NewsSeen]) -> None:
        """Adds what is new: the console offers a line again until this stream has taken it."""
        for one in news:
            if one.number > self._last_news:
                self._last_news = one.number
                self._news.append(one)

    def __rich__(self) -> RenderableType:
        lines: list[RenderableType] = [Text()]
        if self._seen is not None:
            lines += [headline(self._seen), executor_table(self._seen.executors)]
        lines += [news_line(one) for one in self._news]
        if self.problem:
            lines.append(one_line(printable(self.problem), "yellow"))
        return Group(*lines)


def headline(seen: MeshSeen) -> Text:
    point = seen.point
    parts = [
        counted(len(seen.executors), "executor"),
        counted(point.live, "sequence") + (f", {point.waiting} waiting" if point.waiting else ""),
        f"{point.steps_per_s:,.0f} steps/s",
    ]
    if point.request_ms >= 0:
        parts.append(f"{point.request_ms:.1f} ms a request")
    if point.batch >= 0:
        parts.append(f"{point.batch:.1f} rows a batch")
    line = one_line(" · ".join(parts), "bold")
    if point.failed_per_s:
        line.append(f" · {point.failed_per_s:,.0f} failed/s", "red")
    return line


def executor_table(executors: Sequence[ExecutorLine]) -> RenderableType:
    """A line for each executor: its sequences, beside those of the fullest one; the rows of its latest batches; what
    waits there."""
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    most = max((one.held for one in executors), default=0)
    for one in executors[:EXECUTORS_SHOWN]:
        table.add_row(
            Text(printable(one.name)),
            Text(one.state, STATES.get(one.state, "red")),
            ProgressBar(total=max(1, most), completed=one.held, width=BAR_COLUMNS),
            Text(counted(one.held, "sequence")),
            Text(f"batches {drawn}" if (drawn := blocks(one.batches)) else ""),
            Text(f"{one.pending:,} wait" if one.pending else "", "yellow"),
        )
    more = len(executors) - EXECUTORS_SHOWN
    return Group(table, one_line(f"and {more} more: the console shows them", "dim")) if more > 0 else table


def blocks(batches: Sequence[int]) -> str:
    """The latest batches as blocks, as high as they have rows; the largest of them is a whole block."""
    recent = batches[-RECENT_BATCHES:]
    largest = max(recent, default=0)
    return "".join(BLOCKS[max(0, rows * len(BLOCKS) // largest - 1)] for rows in recent) if largest else ""


def news_line(news: NewsSeen) -> Text:
    """A line of the console's log."""
    at = datetime.fromtimestamp(news.at_ms / 1000).astimezone().strftime("%H:%M:%S")
    return one_line(f"{at}  ", "dim").append(printable(news.text), TONES.get(news.tone, "default"))


def one_line(text: str, style: str = "") -> Text:
    """A text that is cut where the terminal ends."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


async def shown(console_url: str, token: str) -> None:
    """Draws the mesh until cancelled; then the lines are gone. What is printed meanwhile stands above them.

    Returns at once on a terminal that cannot draw a line again.
    """
    terminal = Console()
    if terminal.is_dumb_terminal:
        return
    screen = MeshLines()
    with Live(screen, console=terminal, auto_refresh=False, transient=True) as live:
        while True:
            try:
                async for kind, data in messages(f"{console_url}/api/live", token):
                    screen.take(kind, data)
                    if is_read(terminal.file):
                        live.refresh()
            except (aiohttp.ClientError, TimeoutError):
                screen.problem = "the console does not answer at the moment"
            except msgspec.DecodeError as unlike:
                screen.problem = f"the console tells what this release does not read: {unlike}"
            if is_read(terminal.file):
                live.refresh()
            await asyncio.sleep(RETRY_S)


async def messages(url: str, token: str) -> AsyncIterator[tuple[str, bytes]]:
    """The messages of a stream of server-sent events: kind, JSON. Raises aiohttp.ClientError and TimeoutError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    session = aiohttp.ClientSession(timeout=timeout, raise_for_status=True, read_bufsize=1 << 22)
    headers = {"authorization": f"Bearer {token}"}
    async with session, session.get(url, headers=headers) as answer:
        kind = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, line[6:]
