"""One client's connection: reads for the protocol, writes what it answers, and ends when its client is too slow."""

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
"""A client's pool must not lose an idle connection while it is about to use it."""
HEAD_S = 30.0
"""How long a head may take to come: a connection's first from its beginning, others from their first byte."""
LEAVING_PATIENCE_S = 3.0
"""In place of PATIENCE_S while the gateway stops."""
READ_BYTES = 64 << 10
WRITE_AHEAD_BYTES = 64 << 10
"""What a transport takes before a writer has to wait (asyncio's own bound)."""


class ServedConnection:
    """`run` serves it to its end; `check` has to be called now and then."""

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
        """When it is ended, and its client has neither closed its side nor sent anything for a while."""
        self._unsent = 0, 0.0
        """Bytes, and since when there are so many; kept only while the gateway stops."""

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
        """Ends it when its client is too slow. left_at: since when the gateway stops."""
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
            if now > begin + patience_s + exchange.received / SLOWEST_BYTES_S:
                slow = f"{exchange.received} bytes in {now - exchange.began:.1f} s"
                self.end(HTTPStatus.REQUEST_TIMEOUT, f"the request's body does not come: {slow}")
        if left_at is not None:
            self._check_taken(now)

    def see_off(self) -> None:
        """Ends it if it has no request."""
        if self._seat.is_waiting and self._abort_at is None:
            self.end(HTTPStatus.SERVICE_UNAVAILABLE, "Server exiting")

    def end(self, status: int, error: str) -> None:
        """Ends it from outside. A client of which part of a request has come is told why."""
        protocol = self._protocol
        if protocol is None or self._abort_at is not None:
            self._transport.abort()
            return
        is_within_request = protocol.is_within_request
        if is_within_request:
            with contextlib.suppress(OSError, RuntimeError):  # it has just been lost
                self._writer.write(protocol.refusal(status, error))
        self._ending = asyncio.get_running_loop().create_task(protocol.end(), name="ended connection")
        self._finish(lingering=is_within_request)

    async def _read(self, protocol: Http1) -> None:
        while not self._reader.at_eof():
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                break
            if self._abort_at is not None:
                self._abort_at = min(self._now() + LINGER_S, self._seat.until)
                continue
            await protocol.handle(RawData(data))
            if self._seat.is_waiting and protocol.is_within_request:
                self._seat.until = min(self._seat.until, self._now() + HEAD_S)
        await protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        """Does what the protocol wants."""
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
        """Returns when the client has all but a small rest. Raises TimeoutError."""
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
        """Nothing is answered any more.

        lingering  the client may be sending: were it not read, the system would reset the connection, and the client
                   lose the answer that says why (RFC 9112, 9.6)
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
