"""One client's connection: how patient the gateway is with its client, whichever parser reads its requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Protocol

import orjson

from gateway.bounds.clients import CROWDED, PATIENCE_S, SLOWEST_BYTES_S
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.ports.handshakes import WRITE_AHEAD_BYTES
from gateway.ports.listening import progress
from gateway.ports.seats import Seat
from gateway.ports.turns import LoopTurns

KEEP_ALIVE_S = 600.0
"""How long a connection without a request stays open. Long, so that a client's pool does not find its connection closed
just when it sends a request."""
HEAD_S = 30.0
"""How long a request's head may take to come. The first head of a connection counts from the connection's beginning,
later ones from their first byte."""
LEAVING_PATIENCE_S = 3.0
"""Replaces PATIENCE_S while the gateway stops."""
LINGER_S = 2.0
"""How long an early answer waits for the rest of its request's body."""
AHEAD_BYTES = 128 << 10
"""Bytes of a body that may wait for the application. At this bound the connection is not read."""
VERSIONS = (b"1.0", b"1.1")
NOT_SERVED = "HTTP/{version} is not served: use HTTP/1.1"
CLOSE = (b"connection", b"close")
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
"""The words behind a status. Clients show them in their errors, in front of the body or in its place."""
ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
"""What stands before the path in a target in absolute form."""


def origin_form(target: bytes) -> bytes:
    """A request's target without its origin, which some clients name and every server accepts (RFC 9112, 3.2.2)."""
    if target.startswith(b"/") or (origin := ORIGIN.match(target)) is None:
        return target
    path = target[origin.end() :]
    return path if path.startswith(b"/") else b"/" + path


class Incoming(Protocol):
    """A request that is being answered.

    began     when its head had come, by the loop's clock
    received  bytes of its body so far
    is_whole  whether all of it has come
    """

    began: float
    received: int

    @property
    def is_whole(self) -> bool: ...


class Connection(ABC):
    """One connection. `run` serves it to its end; call `check` regularly.

    Its class is made with an ASGI application, Hypercorn's configuration and context, a seat, the count of answers that
    are not taken, and the turns that it takes with the other connections of its port.
    """

    def __init__(self, seat: Seat, unread: UnreadAnswers, turns: LoopTurns) -> None:
        self._seat = seat
        self._unread = unread
        self._turns = turns
        self._now = asyncio.get_running_loop().time
        self._transport: asyncio.Transport
        self._is_tls = False
        self._abort_at: float | None = None
        """When the connection is cut off. Set once it has been ended: its client may then still read the answer."""
        self._progress = 0, 0.0
        """How far the client had come in taking its answers, and since when. Looked at only while the gateway stops."""

    @property
    @abstractmethod
    def protocol(self) -> asyncio.Protocol:
        """What the transport of this connection speaks to."""

    @abstractmethod
    async def run(self, transport: asyncio.Transport) -> None:
        """Serves the connection, which is open now. Returns when it is closed."""

    @property
    @abstractmethod
    def _incoming(self) -> Incoming | None:
        """The request that is being answered, if there is one."""

    @property
    @abstractmethod
    def _is_within_request(self) -> bool:
        """Whether part of a request has come, and part of it is still to come."""

    @property
    @abstractmethod
    def ahead_bytes(self) -> int:
        """Bytes that have come and that nobody has taken."""

    @abstractmethod
    def _refusal(self, status: int, error: str) -> bytes:
        """The bytes of an error answer after which the connection ends.

        Empty when part of another answer has been sent: the client would read them as part of that one.
        """

    @abstractmethod
    def _abandon(self) -> None:
        """Stops reading and answering. The application is told that its client has left."""

    @abstractmethod
    async def _drained(self) -> None:
        """Returns when the transport takes more bytes, or the connection is lost."""

    def check(self, now: float, left_at: float | None) -> None:
        """Ends the connection if its client is too slow. left_at: when the gateway began to stop, else None."""
        if self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
        elif self._seat.is_waiting:
            if now >= self._seat.until:
                self.end(HTTPStatus.REQUEST_TIMEOUT, f"the request's head does not come within {HEAD_S:g} s")
        elif (incoming := self._incoming) is not None and not incoming.is_whole:
            begin, patience_s = incoming.began, PATIENCE_S
            if left_at is not None:
                begin, patience_s = max(begin, left_at), LEAVING_PATIENCE_S
            # Every byte that has come gives the client more time, so a slow but steady one is not cut off.
            if now > begin + patience_s + incoming.received / SLOWEST_BYTES_S:
                slow = f"{incoming.received} bytes in {now - incoming.began:.1f} s"
                self.end(HTTPStatus.REQUEST_TIMEOUT, f"the request's body does not come: {slow}")
        if left_at is not None:
            self._check_taken(now)

    def see_off(self) -> None:
        """Ends the connection if it has no request."""
        if self._seat.is_waiting and self._abort_at is None:
            self.end(HTTPStatus.SERVICE_UNAVAILABLE, "Server exiting")

    def crowd_out(self) -> None:
        """Ends the connection: another one gets its seat."""
        self.end(HTTPStatus.SERVICE_UNAVAILABLE, CROWDED)

    def cut(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    def end(self, status: int, error: str) -> None:
        """Ends the connection, whatever it is at. A client in the middle of a request is told why."""
        if self._abort_at is not None:
            self._transport.abort()
            return
        is_within_request = self._is_within_request
        if is_within_request:
            with contextlib.suppress(OSError, RuntimeError):  # it has just been lost
                self._transport.write(self._refusal(status, error))
        self._finish(lingering=is_within_request)
        self._abandon()

    def _opened(self, transport: asyncio.Transport) -> None:
        """The connection is open now."""
        self._transport = transport
        self._is_tls = transport.get_extra_info("ssl_object") is not None

    async def _deliver(self, parts: Sequence[bytes]) -> None:
        """Sends a part of the answer. Returns when the client has read it, but for a small rest in the transport.

        Raises TimeoutError when the client reads too slowly.
        """
        rest: deque[memoryview] = deque()
        if self._is_tls and sum(map(len, parts)) > WRITE_AHEAD_BYTES:
            # TLS hands on what it gets, and does not count what waits below: so it gets a piece at a time.
            for part in parts:
                rest += [memoryview(part)[at : at + WRITE_AHEAD_BYTES] for at in range(0, len(part), WRITE_AHEAD_BYTES)]
            while rest and self._transport.get_write_buffer_size() < WRITE_AHEAD_BYTES:
                self._transport.write(rest.popleft())
        else:
            self._transport.writelines(parts)
        if not rest and self._transport.get_write_buffer_size() < WRITE_AHEAD_BYTES:
            # Nothing to wait for, and so no need of a timer.
            await self._drained()
            return
        size = self._unread_bytes(rest)
        began = self._now()
        deadline = began + PATIENCE_S
        self._unread.add(self, size, self._transport.abort)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._hand_on(rest)
                        return
                except TimeoutError:
                    # Each byte that the client has read since gives it more time.
                    earned = began + PATIENCE_S + (size - self._unread_bytes(rest)) / SLOWEST_BYTES_S
                    if earned <= deadline:
                        raise
                    deadline = earned
        finally:
            self._unread.took(self, size)

    def _unread_bytes(self, rest: Iterable[memoryview]) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, rest))

    async def _hand_on(self, rest: deque[memoryview]) -> None:
        """Gives the transport the rest of an answer. Returns when that has left. May be cancelled and called again."""
        while rest and not self._transport.is_closing():
            await self._drained()
            self._transport.write(rest.popleft())
        await self._drained()

    def _check_taken(self, now: float) -> None:
        reached = progress(self._transport)
        is_awaited = self._transport.get_write_buffer_size() or self._abort_at is not None
        if reached != self._progress[0]:
            self._progress = reached, now
        elif is_awaited and now > self._progress[1] + LEAVING_PATIENCE_S:
            # It takes nothing more, or does not close its side of TLS: a client does that when it reads, and an idle
            # one may not read before its next request.
            self._transport.abort()

    def _finish(self, *, lingering: bool) -> None:
        """Closes our side of the connection, and sets when it is cut off.

        lingering  the client may still be sending. Its bytes are then read and dropped for a while: otherwise the
                   system would reset the connection, and the client would lose the answer (RFC 9112, 9.6)
        """
        now = self._now()
        self._seat.wait(now, PATIENCE_S)
        self._abort_at = now + (LINGER_S if lingering else PATIENCE_S)
        if lingering:
            with contextlib.suppress(NotImplementedError, OSError, RuntimeError):  # TLS has no half of a connection
                self._transport.write_eof()
        else:
            self._transport.close()

    def _note_head(self) -> None:
        """Notes that part of a head has come, and the rest of it has not."""
        self._seat.until = min(self._seat.until, self._now() + HEAD_S)

    def _linger(self) -> None:
        """Notes that bytes came after the end. They are dropped, at most until the seat's time is over."""
        self._abort_at = min(self._now() + LINGER_S, self._seat.until)


def error_body(error: str) -> bytes:
    return orjson.dumps({"error": error})
