"""A TCP proxy that misbehaves on request: between the services and Redis, or between clients and a gateway.

It runs an event loop in a thread of its own. Every method may be called from any thread, and takes effect before it
returns. The methods act on links: a link is a client's connection together with the one to the target that was made
for it. The argument `of` selects links by the name that the client gave itself, or by the beginning of that name
(`CLIENT SETNAME`, which every service sends to Redis); "" selects all.

    cut         both ends get RST at once
    strand      half-open: nothing passes any more, and neither end learns of the other's end (no FIN, no RST)
    hold        bytes wait, in order, until `release`; also on links that are made meanwhile
    delay       each piece of bytes is passed on this much later

Bytes are never changed, reordered or doubled, because TCP does not do that either.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import TypeVar

import uvloop

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 16
NAME = re.compile(rb"SETNAME\r\n\$\d+\r\n([^\r]+)\r\n")
CLOSE_TIMEOUT_S = 60.0
NO_LINGER = struct.pack("ii", 1, 0)
"""An option of a socket: closing it sends RST."""

T = TypeVar("T")


class Way(Flag):
    """The ways of bytes: from the client, to the client."""

    REQUESTS = auto()
    REPLIES = auto()
    BOTH = REQUESTS | REPLIES


@dataclass(frozen=True, slots=True)
class _Rule:
    of: str
    way: Way
    delay_s: float | None = None


class ProxiedLink:
    """One client's connection and its own connection to the target."""

    def __init__(self, client: asyncio.StreamWriter, target: asyncio.StreamWriter) -> None:
        self.client = client
        self.target = target
        self.name = ""
        self.stranded = False
        self.over = False

    def belongs_to(self, of: str) -> bool:
        return self.name.startswith(of)

    def cut(self) -> None:
        if not self.over:
            reset(self.client)
            reset(self.target)
        self.close()

    def close(self) -> None:
        self.over = True
        self.client.transport.abort()
        self.target.transport.abort()


def reset(connection: asyncio.StreamWriter) -> None:
    """Ends a connection with RST. Without the option the system sends FIN, unless something has come unread."""
    with contextlib.suppress(OSError, ValueError):  # it has ended
        connection.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    connection.transport.abort()


class Proxy:
    """A proxy in front of one TCP address, on a free port."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self.port = 0
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        # All of the following is touched by the loop's thread alone.
        self._closing = asyncio.Event()
        self._links: set[ProxiedLink] = set()
        self._holds: set[_Rule] = set()
        self._delays: list[_Rule] = []
        self._changed = asyncio.Event()

    def listen(self) -> str:
        """Begins to listen. Returns the address, host:port."""
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._thread.start()
        return self.address

    def close(self) -> None:
        """Cuts all links, and listens no more."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        assert not self._thread.is_alive(), "the proxy did not end"

    @property
    def address(self) -> str:
        """host:port, where it listens."""
        return f"{HOST}:{self.port}"

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, of: str = "") -> int:
        """Cuts the links; returns how many there were. New ones are served."""
        return self._for_each(of, ProxiedLink.cut)

    def strand(self, of: str = "") -> int:
        """Leaves the present links half-open, for as long as the proxy lives; new ones are served."""
        return self._for_each(of, lambda link: setattr(link, "stranded", True))

    def hold(self, of: str = "", way: Way = Way.BOTH) -> None:
        """Bytes wait until `release`."""
        self._ask(lambda: self._holds.add(_Rule(of, way)))

    def release(self) -> None:
        """Ends every `hold`: what waited passes, in order."""
        self._ask(self._holds.clear)

    def delay(self, seconds: float, of: str = "", way: Way = Way.BOTH) -> None:
        """Each piece of bytes is passed on so much later from now on; 0 ends the delays of these links."""

        def set_delay() -> None:
            self._delays = [rule for rule in self._delays if (rule.of, rule.way) != (of, way)]
            if seconds:
                self._delays.append(_Rule(of, way, seconds))

        self._ask(set_delay)

    # -- the loop's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener)
        await self._closing.wait()
        server.close()
        for link in self._links:
            link.cut()
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
        link = ProxiedLink(client, target)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pass_on(link, requests, target, Way.REQUESTS), self._pass_on(link, replies, client, Way.REPLIES)
            )
        except asyncio.CancelledError:
            # asyncio's own callback of this task takes a cancellation for a failure, and prints it.
            if not self._closing.is_set():
                raise
        finally:
            link.close()
            self._links.discard(link)

    async def _pass_on(
        self, link: ProxiedLink, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way
    ) -> None:
        """One way of a link, until its source ends; then the sink is told, unless the link is half-open."""
        # uvloop raises RuntimeError when a connection that was cut is written to.
        with contextlib.suppress(OSError, RuntimeError):
            while piece := await source.read(PIECE_BYTES):
                if not await self._permitted(link, way):
                    continue
                self._examine(link, piece, way)
                if link.over:
                    return
                sink.write(piece)
                await sink.drain()
        while link.stranded and not link.over:
            await self._changed.wait()
        with contextlib.suppress(OSError, RuntimeError):
            # After the end of the source's bytes; what was read before has been written.
            sink.write_eof()

    async def _permitted(self, link: ProxiedLink, way: Way) -> bool:
        """Waits as the rules say; False when these bytes go nowhere."""
        if delay_s := sum(rule.delay_s or 0.0 for rule in self._delays if rule.way & way and link.belongs_to(rule.of)):
            await asyncio.sleep(delay_s)
        while not link.stranded and any(rule.way & way and link.belongs_to(rule.of) for rule in self._holds):
            await self._changed.wait()
        return not link.stranded

    def _examine(self, link: ProxiedLink, piece: bytes, way: Way) -> None:
        """Learns a link's name from its requests."""
        if way is Way.REQUESTS and not link.name and (named := NAME.search(piece)):
            link.name = named[1].decode(errors="replace")

    # -- other threads --------------------------------------------------------------------------------------------

    def _for_each(self, of: str, act: Callable[[ProxiedLink], object]) -> int:
        """Returns how many links there were."""

        def act_on_all() -> int:
            links = [link for link in self._links if link.belongs_to(of)]
            for link in links:
                act(link)
            return len(links)

        return self._ask(act_on_all)

    def _ask(self, question: Callable[[], T]) -> T:
        """Lets the loop's thread answer a question, or make a change."""

        async def answer() -> T:
            found = question()
            # Coroutines that wait for a change of the rules look again.
            self._changed.set()
            self._changed = asyncio.Event()
            return found

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(CLOSE_TIMEOUT_S)
