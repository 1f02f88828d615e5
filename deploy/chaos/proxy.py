"""A TCP proxy that misbehaves on request: between the services and Redis, or between clients and a gateway.

It runs an event loop in a thread of its own. Every method may be called from any thread, and takes effect before it
returns. The methods act on links: a link is a client's connection together with the one to the target that was made
for it. The argument `of` selects links by the name that the client gave itself, or by the beginning of that name
(`CLIENT SETNAME`, which every service sends to Redis); "" selects all.

    cut         both ends get RST at once
    hang_up     the client gets RST; bytes that it had sent still reach the target, delayed by `hold` if that is set
    strand      half-open: nothing passes any more, and neither end learns of the other's end (no FIN, no RST)
    hold        bytes wait, in order, until `release`; also on links that are made meanwhile
    delay       each piece of bytes is passed on this much later
    refuse      links are cut, and new ones as soon as their name is known, until `admit`
    trap        the next request that contains certain bytes is the link's last: it is lost, lost in part, or carried
                out while its reply is lost

Bytes are never changed, reordered or doubled, because TCP does not do that either.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Self, TypeVar

PIECE_BYTES = 1 << 16
NAME = re.compile(rb"SETNAME\r\n\$\d+\r\n([^\r]+)\r\n")
CLOSE_TIMEOUT_S = 10.0
LOST = (OSError, RuntimeError)
"""How writing to a connection that was cut fails: under asyncio's own loop, and under uvloop."""

T = TypeVar("T")


class Way(Flag):
    """The ways of bytes: from the client, to the client."""

    REQUESTS = auto()
    REPLIES = auto()
    BOTH = REQUESTS | REPLIES


class Loss(Enum):
    """What a trap does to the request.

    UNSENT    it is not passed on: the target has seen nothing of it
    PARTIAL   half of it is passed on, then the link is cut
    UNKNOWN   it is passed on, and the link is cut when the first byte of the reply comes: it was carried out, and the
              client does not know
    """

    UNSENT = auto()
    PARTIAL = auto()
    UNKNOWN = auto()


@dataclass(eq=False, slots=True)
class Trap:
    """Waits for a request. sprung: how often it has cut a link so far; left: how often it will do so still."""

    matching: bytes
    loss: Loss
    of: str
    left: int
    sprung: int = 0


@dataclass(frozen=True, slots=True)
class _Rule:
    of: str
    way: Way
    delay_s: float | None = None


class _Link:
    """One client's connection and its own connection to the target."""

    def __init__(self, client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self.client = client
        self.target = target
        self.name = ""
        self.stranded = False
        self.doomed = False
        self.over = False

    def belongs_to(self, of: str) -> bool:
        return self.name.startswith(of)

    def cut(self) -> None:
        self.over = True
        self.client.transport.abort()
        self.target.transport.abort()


class Proxy:
    """A proxy in front of one TCP address. A context manager: listens on entry, is gone on exit.

    host, port  where it listens; port 0 picks a free one
    new_loop    makes its event loop
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self._target = (target_host, target_port)
        self._host = host
        self._port = port
        self._new_loop = new_loop
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._listening = threading.Event()
        self._failure: OSError | None = None
        # All of the following is touched by the loop's thread alone.
        self._closing = asyncio.Event()
        self._links: set[_Link] = set()
        self._holds: set[_Rule] = set()
        self._delays: list[_Rule] = []
        self._refused: set[str] = set()
        self._traps: list[Trap] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        self._loop = self._new_loop()
        self._thread.start()
        self._listening.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        assert not self._thread.is_alive(), "the proxy did not end"

    @property
    def port(self) -> int:
        return self._port

    @property
    def address(self) -> str:
        """host:port, where it listens."""
        return f"{self._host}:{self._port}"

    @property
    def names(self) -> list[str]:
        """What the clients of the present links have called themselves; "" for one that has not."""
        return self._ask(lambda: sorted(link.name for link in self._links))

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, of: str = "") -> int:
        """Cuts the links; returns how many there were. New ones are served."""
        return self._ask(lambda: self._cut(of))

    def hang_up(self, of: str = "") -> int:
        """Cuts the clients' side alone: bytes that they have sent, and that are held or delayed, still arrive."""

        def hang_up() -> int:
            links = self._of(of)
            for link in links:
                link.client.transport.abort()
            return len(links)

        return self._ask(hang_up)

    def strand(self, of: str = "") -> int:
        """Leaves the present links half-open, for as long as the proxy lives; new ones are served."""

        def strand() -> int:
            links = self._of(of)
            for link in links:
                link.stranded = True
            return len(links)

        return self._ask(strand)

    def hold(self, of: str = "", way: Way = Way.BOTH) -> None:
        """Bytes wait until `release`."""
        self._tell(lambda: self._holds.add(_Rule(of, way)))

    def release(self) -> None:
        """Ends every `hold`: what waited passes, in order."""
        self._tell(self._holds.clear)

    def delay(self, seconds: float, of: str = "", way: Way = Way.BOTH) -> None:
        """Each piece of bytes is passed on so much later from now on; 0 ends the delays of these links."""

        def set_delay() -> None:
            self._delays = [rule for rule in self._delays if (rule.of, rule.way) != (of, way)]
            if seconds:
                self._delays.append(_Rule(of, way, seconds))

        self._tell(set_delay)

    def refuse(self, of: str = "") -> int:
        """Cuts the links and everyone that is made until `admit`; returns how many there were."""

        def refuse() -> int:
            self._refused.add(of)
            return self._cut(of)

        return self._ask(refuse)

    def admit(self) -> None:
        """Ends every `refuse`."""
        self._tell(self._refused.clear)

    def trap(self, matching: bytes, loss: Loss, *, of: str = "", times: int = 1) -> Trap:
        """Sets a trap for the next requests that hold these bytes (in one piece of at most 64 KiB), one of each link.

        Of a script that is the name it is called by: `Scripts.digest`.
        """
        trap = Trap(matching, loss, of, times)
        self._tell(lambda: self._traps.append(trap))
        return trap

    def heal(self) -> None:
        """Ends every fault; what is half-open is cut."""

        def heal() -> None:
            for link in self._links:
                if link.stranded:
                    link.cut()
            self._holds.clear()
            self._delays.clear()
            self._refused.clear()
            self._traps.clear()

        self._tell(heal)

    # -- the loop's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._connected, self._host, self._port)
        except OSError as failure:
            self._failure = failure
            self._listening.set()
            return
        self._port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._closing.wait()
        server.close()
        self._cut("")
        served = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)

    async def _connected(self, requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            replies, target = await asyncio.open_connection(*self._target)
        except OSError:
            client.transport.abort()
            return
        link = _Link(client, target)
        self._links.add(link)
        if "" in self._refused:
            link.cut()
        try:
            await asyncio.gather(
                self._pass_on(link, requests, target, Way.REQUESTS), self._pass_on(link, replies, client, Way.REPLIES)
            )
        except asyncio.CancelledError:
            # asyncio's own callback of this task takes a cancellation for a failure, and prints it.
            if not self._closing.is_set():
                raise
        finally:
            link.cut()
            self._links.discard(link)

    async def _pass_on(self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way) -> None:
        """One way of a link, until its source ends; then the sink is told, unless the link is half-open."""
        with contextlib.suppress(*LOST):
            while piece := await source.read(PIECE_BYTES):
                if not await self._permitted(link, way, len(piece)):
                    continue
                if way is Way.REQUESTS:
                    self._examine(link, piece)
                elif link.doomed:
                    link.cut()
                if link.over:
                    return
                sink.write(piece)
                await sink.drain()
        while link.stranded:
            await self._changed.wait()
        with contextlib.suppress(*LOST):
            # After the end of the source's bytes; what was read before has been written.
            sink.write_eof()

    async def _permitted(self, link: _Link, way: Way, size: int) -> bool:
        """Waits as the rules say; False when these bytes go nowhere."""
        delay_s = sum(rule.delay_s or 0.0 for rule in self._delays if rule.way & way and link.belongs_to(rule.of))
        if delay_s and size:
            await asyncio.sleep(delay_s)
        while not link.stranded and any(rule.way & way and link.belongs_to(rule.of) for rule in self._holds):
            await self._changed.wait()
        return not link.stranded

    def _examine(self, link: _Link, piece: bytes) -> None:
        """Looks at a piece of a request: whose link it is, and whether it is the link's last."""
        if not link.name and (named := NAME.search(piece)):
            link.name = named[1].decode(errors="replace")
            if any(link.belongs_to(of) for of in self._refused):
                link.cut()
        trap = next((t for t in self._traps if t.left and t.matching in piece and link.belongs_to(t.of)), None)
        if trap is None or link.doomed or link.over:
            return
        trap.left -= 1
        trap.sprung += 1
        match trap.loss:
            case Loss.UNSENT:
                link.cut()
            case Loss.PARTIAL:
                link.over = True
                link.target.write(piece[: len(piece) // 2])
                link.target.close()
                link.client.transport.abort()
            case Loss.UNKNOWN:
                link.doomed = True

    def _of(self, of: str) -> list[_Link]:
        return [link for link in self._links if link.belongs_to(of)]

    def _cut(self, of: str) -> int:
        links = self._of(of)
        for link in links:
            link.cut()
        return len(links)

    # -- other threads --------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], T]) -> T:
        async def answer() -> T:
            found = question()
            # Coroutines that wait for a change of the rules look again.
            self._changed.set()
            self._changed = asyncio.Event()
            return found

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(CLOSE_TIMEOUT_S)

    def _tell(self, change: Callable[[], object]) -> None:
        self._ask(change)
