"""One call of a client, as the code that serves it sees it: its headers, its messages, and its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.bounds.fair_lock import through_in_thread
from gateway.grpc.wire.messages import IDENTITY, Messages, prefixed
from gateway.grpc.wire.opening import Headers, Metadata, Opening, trailers
from shared.contract.errors import Code, MeshError

OK = 0
"""The status of a call that has succeeded."""
AHEAD_MAX = 16
"""Of the messages that a client has sent ahead, so many are read before the event loop is asked whether its turn has
time for more. Decoding and submitting one takes 0.05 to 0.1 ms, and a window may hold a thousand."""
PACKED_HERE_BYTES = 64 << 10
"""A message up to this size is compressed on the event loop, which takes some milliseconds at most."""


class RpcLink(Protocol):
    """The connection of a call. peer: its client's address; client: whom that counts for"""

    loop: asyncio.AbstractEventLoop
    peer: str
    client: str

    def credit(self, rpc: Rpc) -> None:
        """The call waits for a message: its client may send more of it."""

    def put(self, rpc: Rpc, data: bytes) -> None:
        """Sends bytes of the call's answer. What cannot be sent yet waits in `Rpc.unsent`."""

    def finish(self, rpc: Rpc) -> None:
        """Sends the call's end, when all that it has to say before is sent."""

    def cut(self) -> None:
        """Closes the connection at once, with all of its calls."""

    async def turn(self) -> None:
        """Returns in a turn of the event loop that has time for one more call of this connection's client."""


class Rpc:
    """A call. Its connection sets what is not private.

    opening       what its headers say
    until         when its caller waits no longer, by the loop's clock; None: it waits without end
    messages      those that have come
    message_bytes  size of the one that was read last, unpacked; who reads it sets it
    uncredited    bytes that have come and that its client may not send anew yet
    is_half_closed  its client sends no further message
    is_over       its end is sent, or its client has left
    is_awaited    a message must come now: a slow client loses the call
    since         since when, by the loop's clock
    unsent        bytes of its answer that the connection cannot send yet
    last_headers  its end, when it is known
    """

    __slots__ = (
        "_ahead",
        "_ended",
        "_error",
        "_link",
        "_reading",
        "_writing",
        "encoding",
        "expiry",
        "has_begun",
        "is_awaited",
        "is_half_closed",
        "is_over",
        "last_headers",
        "message_bytes",
        "messages",
        "number",
        "opening",
        "since",
        "task",
        "trailing",
        "uncredited",
        "unsent",
        "until",
    )

    def __init__(self, link: RpcLink, number: int, opening: Opening, size_max: int, until: float | None) -> None:
        self.opening = opening
        self.number = number
        self.until = until
        self.messages = Messages(size_max, opening.encoding)
        self.message_bytes = self.uncredited = 0
        self.is_half_closed = self.is_over = self.is_awaited = self.has_begun = False
        self.since = 0.0
        self.unsent: deque[memoryview] = deque()
        self.last_headers: Headers | None = None
        self.task: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self.trailing: Metadata = ()
        """Metadata that goes with its end, beside that of the end's own."""
        self.encoding = IDENTITY
        self._link = link
        self._error: MeshError | None = None
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._ended: list[Callable[[], object]] = []
        self._ahead = 0
        """Messages that were there before they were asked for."""

    @property
    def peer(self) -> str:
        """The client's address, as gRPC writes it: `ipv4:127.0.0.1:50000`."""
        return self._link.peer

    @property
    def client(self) -> str:
        """With whose other calls it takes turns."""
        return self._link.client

    def time_left_s(self) -> float | None:
        """How long its caller waits; None: without end."""
        return None if self.until is None else self.until - self._link.loop.time()

    def compress(self, encoding: str) -> None:
        """Compresses the messages of the answer, if its client reads that. To be called before the first of them."""
        if encoding in self.opening.accepts:
            self.encoding = encoding

    @property
    def is_reading(self) -> bool:
        """Whether somebody waits for a message."""
        return self._reading is not None

    async def read(self, *, is_awaited: bool = False) -> bytes | None:
        """The next message as it came (`Packed`: compressed). None when no further one comes.

        is_awaited  its client must send it now
        raises      MeshError for what is no message or too large, and when it does not come
        """
        ready = self.messages.ready
        if not ready and self._error is None and not self.is_half_closed and not self.is_over:
            self._reading = self._link.loop.create_future()
            self.is_awaited = is_awaited
            self.since = self._link.loop.time()
            self._link.credit(self)
            try:
                await self._reading
            finally:
                self._reading = None
                self.is_awaited = False
        else:
            self._ahead += 1
            if self._ahead % AHEAD_MAX == 0:
                await self.turn()
        if ready:
            return self.messages.take()
        if self._error is not None:
            raise self._error
        return None

    async def turn(self) -> None:
        """Returns in a turn of the event loop that has time for what takes long. Clients take turns."""
        await self._link.turn()

    async def write(self, message: bytes) -> None:
        """Sends a message. Returns when the connection has sent all of it. When the call is over, it does nothing."""
        if self.is_over:
            return
        if self.encoding != IDENTITY and len(message) > PACKED_HERE_BYTES:
            data = await through_in_thread(prefixed, message, self.encoding)
            if self.is_over:
                return
        else:
            data = prefixed(message, self.encoding)
        del message
        self._link.put(self, data)
        del data
        if self.unsent:
            self._writing = self._link.loop.create_future()
            try:
                await self._writing
            finally:
                self._writing = None

    def end(self, code: int = OK, text: str = "", metadata: Metadata = ()) -> None:
        """Ends the call with a status of gRPC. Only the first call of this counts."""
        if self.last_headers is None and not self.is_over:
            self.last_headers = trailers(code, text, (*self.trailing, *metadata))
            self._link.finish(self)

    def when_ended(self, tell: Callable[[], object]) -> None:
        """Calls `tell` when the last byte of the answer is sent, or the client has left."""
        self._ended.append(tell)

    def cut(self) -> None:
        """Closes the call's connection at once."""
        if not self.is_over:
            self._link.cut()

    # -- what the connection tells ------------------------------------------------------------------------------------

    def came(self, data: bytes) -> None:
        """Bytes of the call have come."""
        if self._error is None:
            try:
                self.messages.feed(data)
            except MeshError as error:
                self.fail(error.released())
                return
            if self.messages.ready:
                wake(self._reading)

    def fail(self, error: MeshError) -> None:
        """Whoever reads the call gets this error, behind the messages that are whole."""
        self._error = error
        self.messages.drop()
        wake(self._reading)

    def give_up(self) -> int:
        """Forgets what has come of the call's messages and nobody has read: memory is short. Returns how many
        bytes that were."""
        given = self.messages.kept_bytes
        self.messages.clear()
        # Not an UnavailableError, which is that of one message: behind this one no other can be read.
        self.fail(MeshError("the gateway has no memory for the messages that are on their way", Code.UNAVAILABLE))
        return given

    def half_closed(self) -> None:
        self.is_half_closed = True
        wake(self._reading)

    def sent(self) -> None:
        """All that waited to be sent is sent."""
        wake(self._writing)
        self._link.finish(self)

    def over(self) -> None:
        """The call has ended, or its client has left."""
        self.is_over = True
        self.unsent.clear()
        if self.expiry is not None:
            self.expiry.cancel()
        wake(self._reading)
        wake(self._writing)
        for tell in self._ended:
            tell()
        self._ended.clear()


def wake(waiting: asyncio.Future[None] | None) -> None:
    """Ends the wait of whoever waits, if anybody does."""
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
