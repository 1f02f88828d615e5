"""The HTTP port: Hypercorn's protocols on connections of our own making.

Hypercorn's own server writes a response in two pieces, each a system call, and keeps an idle task per connection that
it cancels and starts again with every request. Here a response leaves in one piece and idle connections have a timer,
which saved 10 to 30 % of the gateway's CPU time for a small inference.
What HTTP means stays Hypercorn's and h11's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.typing import ConnectionState, LifespanState

from shared.errors import UnavailableError

KEEP_ALIVE_S = 600.0
"""A client's pool must not lose an idle connection while it is about to use it."""
BACKLOG = 1024
"""Connections that may wait to be accepted: a herd of clients that starts at once."""
READ_BYTES = 1 << 16
WRITE_AT_ONCE_BYTES = 1 << 16
"""Beyond this a response is not held back any more: large ones go out in pieces, at the client's pace."""
UNLIMITED = 1 << 62


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises UnavailableError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.bind((host, port))
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise UnavailableError(f"HTTP cannot listen on {host}:{port}: {error}") from error
    server.setblocking(False)  # noqa: FBT003  the socket module's own signature
    return server


async def serve_http(app: Any, server: socket.socket, *, stop: Callable[[], Awaitable[object]], grace_s: float) -> None:
    """Serves an ASGI application (without lifespan) on a listening socket until `stop` returns.

    Then the port closes, idle connections end at once, and open requests are answered within the grace.

    server   is closed at the end
    grace_s  how long open requests may take once the stop was asked for
    """
    connections = Connections(app)
    port = await asyncio.start_server(connections.serve, sock=server, backlog=BACKLOG, limit=READ_BYTES)
    try:
        await stop()
    finally:
        port.close()
        await connections.end(grace_s)


def hypercorn_config() -> Config:
    """What Hypercorn's protocols are told."""
    config = Config()
    config.keep_alive_max_requests = UNLIMITED
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn")
    # Unbounded: with a bound, a connection whose request was refused before its body was read would hang for ever in
    # putting the rest into the queue. What is read of a body is bounded by the endpoint (`rest.body`).
    config.max_app_queue_size = 0
    return config


class Connections:
    """The open connections of one port."""

    def __init__(self, app: Any) -> None:
        self._app = ASGIWrapper(app)
        self._config = hypercorn_config()
        self._context = WorkerContext(None)
        self._open: dict[asyncio.Task[Any], Connection] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end."""
        connection = Connection(self._app, self._config, self._context, reader, writer)
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._open[task] = connection
        try:
            await connection.run()
        finally:
            del self._open[task]

    async def end(self, grace_s: float) -> None:
        """Ends idle connections now and busy ones after their response; cancels what is left after the grace."""
        await self._context.terminated.set()
        for connection in self._open.values():
            connection.close_if_idle()
        if self._open:
            await asyncio.wait(list(self._open), timeout=grace_s)
        left = list(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Connection:
    """One client. Hypercorn's protocol calls `_send`, and is handed what the client sends."""

    def __init__(
        self,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._flush_handle: asyncio.Handle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle = False

    async def run(self) -> None:
        """Serves requests until either side ends the connection."""
        self._set_idle(idle=True)
        try:
            async with TaskGroup(self._loop) as tasks:
                protocol = ProtocolWrapper(
                    self._app,
                    self._config,
                    self._context,
                    tasks,
                    ConnectionState(LifespanState({})),
                    ssl=False,
                    client=self._address("peername"),
                    server=self._address("sockname"),
                    send=self._send,
                    alpn_protocol="http/1.1",
                )
                await protocol.initiate()
                await self._read(protocol)
        finally:
            self._stop_timers()
            self._flush()
            self._writer.close()

    def close_if_idle(self) -> None:
        """Ends the connection unless a request is open."""
        if self._idle:
            self._writer.close()

    def _address(self, name: str) -> tuple[str, int]:
        host, port, *_ = self._writer.get_extra_info(name) or ("", 0)
        return host, port

    async def _read(self, protocol: ProtocolWrapper) -> None:
        while data := await self._received():
            await protocol.handle(RawData(data))
        await protocol.handle(Closed())

    async def _received(self) -> bytes:
        """What the client sent next; nothing when it has gone, in whatever way."""
        try:
            return await self._reader.read(READ_BYTES)
        except OSError:
            return b""

    async def _send(self, event: Event) -> None:
        match event:
            case RawData(data=data):
                await self._write(data)
            case Closed():
                self._flush()
                self._writer.close()
            case Updated(idle=idle):
                self._set_idle(idle=idle)
            case _:
                pass

    async def _write(self, data: bytes) -> None:
        """Holds data back until this turn of the loop ends: by then the rest of a small response is there too."""
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > WRITE_AT_ONCE_BYTES:
            self._flush()
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._unsent and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0

    def _set_idle(self, *, idle: bool) -> None:
        self._idle = idle
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if idle:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self.close_if_idle)

    def _stop_timers(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
