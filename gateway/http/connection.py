"""One client's connection: passes bytes between the socket and the protocol, and ends when its client is too slow."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.events import Updated as Turned
from hypercorn.typing import ConnectionState

from gateway.bounds.clients import PATIENCE_S, SLOWEST_BYTES_S
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.http.protocol import LINGER_S, Applications, Http1
from gateway.http.seats import Seat

KEEP_ALIVE_S = 600.0
"""How long a connection without a request stays open. Long, so that a client's pool does not find its connection closed
just when it sends a request."""
HEAD_S = 30.0
"""How long a request's head may take to come. The first head of a connection counts from the connection's beginning,
later ones from their first byte."""
LEAVING_PATIENCE_S = 3.0
"""Replaces PATIENCE_S while the gateway stops."""
READ_BYTES = 64 << 10
WRITE_AHEAD_BYTES = 64 << 10
"""Bytes that a transport buffers before a writer must wait: asyncio's own default."""


class ServedConnection:
    """One connection. `run` serves it to its end; call `check` regularly."""

    def __init__(
        self,
        app: Any,
        config: Config,
        context: WorkerContext,
        seat: Seat,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unread: UnreadAnswers,
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._seat = seat
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport
        self._unread = unread
        self._now = asyncio.get_running_loop().time
        self._sending = asyncio.Lock()
        self._protocol: Http1 | None = None
        self._ending: asyncio.Task[None] | None = None
        self._abort_at: float | None = None
        """When the connection is cut off. Set once it has been ended: its client may then still read the answer."""
        self._unsent = 0, 0.0
        """Bytes that wait in the transport, and since when their number has not changed. Kept only while the gateway
        stops."""

    async def run(self) -> None:
        """Returns when the connection is closed."""
        try:
            socket = self._writer.get_extra_info("socket")
            ends: list[Any] = [address[:2] for address in (socket.getpeername(), socket.getsockname())]
            is_tls = self._writer.get_extra_info("ssl_object") is not None
            async with Applications(asyncio.get_running_loop()) as tasks:
                state: Any = {}
                self._protocol = Http1(
                    self._app, self._config, self._context, tasks, ConnectionState(state), is_tls, *ends, self._send
                )
                await self._read(self._protocol)
        except OSError:
            pass  # the client left before the beginning
        finally:
            await self._close()

    def check(self, now: float, left_at: float | None) -> None:
        """Ends the connection if its client is too slow. left_at: when the gateway began to stop, else None."""
        protocol = self._protocol
        if self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
        elif protocol is None:
            pass
        elif self._seat.is_waiting:
            if now >= self._seat.until:
                self.end(HTTPStatus.REQUEST_TIMEOUT, f"the request's head does not come within {HEAD_S:g} s")
        elif (exchange := protocol.exchange) is not None and not exchange.is_whole:
            begin, patience_s = exchange.began, PATIENCE_S
            if left_at is not None:
                begin, patience_s = max(begin, left_at), LEAVING_PATIENCE_S
            # Every byte that has come gives the client more time, so a slow but steady one is not cut off.
            if now > begin + patience_s + exchange.received / SLOWEST_BYTES_S:
                slow = f"{exchange.received} bytes in {now - exchange.began:.1f} s"
                self.end(HTTPStatus.REQUEST_TIMEOUT, f"the request's body does not come: {slow}")
        if left_at is not None:
            self._check_taken(now)

    def see_off(self) -> None:
        """Ends the connection if it has no request."""
        if self._seat.is_waiting and self._abort_at is None:
            self.end(HTTPStatus.SERVICE_UNAVAILABLE, "Server exiting")

    def end(self, status: int, error: str) -> None:
        """Ends the connection from outside the protocol. A client in the middle of a request is told why."""
        protocol = self._protocol
        if protocol is None or self._abort_at is not None:
            self._transport.abort()
            return
        is_within_request = protocol.is_within_request
        if is_within_request:
            with contextlib.suppress(OSError, RuntimeError):  # it has just been lost
                self._writer.write(protocol.refusal(status, error))
        # Kept in an attribute, because asyncio itself holds its tasks only weakly.
        self._ending = asyncio.get_running_loop().create_task(protocol.end(), name="ended connection")
        self._finish(lingering=is_within_request)

    async def _read(self, protocol: Http1) -> None:
        while not self._reader.at_eof():
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                break
            if self._abort_at is not None:
                # The connection was ended: its bytes are only dropped, at most until the seat's time is over.
                self._abort_at = min(self._now() + LINGER_S, self._seat.until)
                continue
            await protocol.handle(RawData(data))
            if self._seat.is_waiting and protocol.is_within_request:
                self._seat.until = min(self._seat.until, self._now() + HEAD_S)
        await protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        """Carries out an event of the protocol: it has bytes to send, is idle or busy, or wants to close."""
        assert self._protocol is not None, "it is the protocol's call"
        match event:
            case RawData(data):
                await self._write(data)
            case Turned(idle=True):
                self._seat.wait(self._now(), KEEP_ALIVE_S)
            case Turned():
                self._seat.work()
            case _ if self._abort_at is None:
                is_within_request = self._protocol.is_within_request
                await self._protocol.end()
                self._finish(lingering=is_within_request)
            case _:
                pass

    async def _write(self, data: bytes) -> None:
        assert self._protocol is not None, "it is the protocol's call"
        async with self._sending:
            try:
                self._writer.write(data)
                await self._taken()
            except (ConnectionError, RuntimeError, TimeoutError):
                self._transport.abort()
                self._abort_at = self._now()
                await self._protocol.end()

    async def _taken(self) -> None:
        """Returns when the client has read the answer, but for a small rest in the transport.

        Raises TimeoutError when the client reads too slowly.
        """
        size = self._transport.get_write_buffer_size()
        if size <= WRITE_AHEAD_BYTES:
            # Nothing to wait for, and so no need of a timer.
            await self._writer.drain()
            return
        began = self._now()
        deadline = began + PATIENCE_S
        self._unread.add(self, size, self._transport.abort)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._writer.drain()
                        return
                except TimeoutError:
                    # Each byte that the client has read since gives it more time.
                    earned = began + PATIENCE_S + (size - self._transport.get_write_buffer_size()) / SLOWEST_BYTES_S
                    if earned <= deadline:
                        raise
                    deadline = earned
        finally:
            self._unread.took(self, size)

    def _check_taken(self, now: float) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent != self._unsent[0]:
            self._unsent = unsent, now
        elif unsent and now > self._unsent[1] + LEAVING_PATIENCE_S:
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
                self._writer.write_eof()
        else:
            self._writer.close()

    async def _close(self) -> None:
        if self._abort_at is None:
            self._abort_at = self._now() + PATIENCE_S
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
            await self._writer.wait_closed()
