"""A connection whose HTTP/1.1 is Hypercorn's and h11's: passes bytes between the socket and `hypercorn_protocol`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.events import Updated as Turned
from hypercorn.typing import ConnectionState

from gateway.bounds.clients import PATIENCE_S
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.http.connection import KEEP_ALIVE_S, Connection
from gateway.http.hypercorn_protocol import Applications, Exchange, Http1
from gateway.ports.seats import Seat
from gateway.ports.turns import LoopTurns

READ_BYTES = 64 << 10


class HypercornConnection(Connection):
    """A connection whose HTTP/1.1 Hypercorn reads, with h11."""

    def __init__(
        self,
        app: Any,
        config: Config,
        context: WorkerContext,
        seat: Seat,
        unread: UnreadAnswers,
        turns: LoopTurns,
    ) -> None:
        super().__init__(seat, unread, turns)
        self._app = ASGIWrapper(app)
        self._config = config
        self._context = context
        self._reader = asyncio.StreamReader()
        self._streams = asyncio.StreamReaderProtocol(self._reader)
        self._writer: asyncio.StreamWriter
        self._http: Http1
        self._sending = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    @property
    def protocol(self) -> asyncio.Protocol:
        return self._streams

    async def run(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._opened(transport)
        self._writer = asyncio.StreamWriter(transport, self._streams, self._reader, loop)
        try:
            socket = transport.get_extra_info("socket")
            ends: list[Any] = [address[:2] for address in (socket.getpeername(), socket.getsockname())]
            async with Applications(loop) as tasks:
                state: Any = ConnectionState({})
                self._http = Http1(
                    self._app, self._config, self._context, tasks, state, self._is_tls, *ends, self._send
                )
                await self._read()
        except OSError:
            pass  # the client left before the beginning
        finally:
            await self._close()

    @property
    def _incoming(self) -> Exchange | None:
        return self._http.exchange

    @property
    def _is_within_request(self) -> bool:
        return self._http.is_within_request

    @property
    def ahead_bytes(self) -> int:
        reader: Any = self._reader
        return len(reader._buffer)  # noqa: SLF001

    def _refusal(self, status: int, error: str) -> bytes:
        return self._http.refusal(status, error)

    def _abandon(self) -> None:
        # Kept in an attribute, because asyncio itself holds its tasks only weakly.
        self._ending = asyncio.get_running_loop().create_task(self._http.end(), name="ended connection")

    async def _drained(self) -> None:
        await self._writer.drain()

    async def _read(self) -> None:
        while not self._reader.at_eof():
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                break
            if self._abort_at is not None:
                self._linger()
                continue
            await self._http.handle(RawData(data))
            if self._seat.is_waiting and self._http.is_within_request:
                self._note_head()
        await self._http.handle(Closed())

    async def _send(self, event: Event) -> None:
        """Carries out an event of the protocol: it has bytes to send, is idle or busy, or wants to close."""
        match event:
            case RawData(data):
                await self._write(data)
            case Turned(idle=True):
                self._seat.wait(self._now(), KEEP_ALIVE_S)
            case Turned():
                self._seat.work()
            case _ if self._abort_at is None:
                is_within_request = self._http.is_within_request
                await self._http.end()
                self._finish(lingering=is_within_request)
            case _:
                pass

    async def _write(self, data: bytes) -> None:
        async with self._sending:
            try:
                await self._deliver([data])
            except (ConnectionError, RuntimeError, TimeoutError):
                self._transport.abort()
                self._abort_at = self._now()
                await self._http.end()

    async def _close(self) -> None:
        if self._abort_at is None:
            self._abort_at = self._now() + PATIENCE_S
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
            await self._writer.wait_closed()
