"""Hypercorn, configured for a gateway: HTTP/1.1 by h11, connections that stay open, and a stop that answers first."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData

from gateway.rest.body import PATIENCE_S, SLOWEST_BYTES_S
from gateway.settings import Certificate
from shared.errors import UnavailableError
from shared.lifecycle import end

KEEP_ALIVE_S = 600.0
"""A client's pool must not lose an idle connection while it is about to use it."""
BACKLOG = 1024
"""Connections that may wait to be accepted: a herd of clients that starts at once."""
UNLIMITED = 1 << 62
WRITE_AHEAD_BYTES = 64 << 10
"""What a transport takes before a writer has to wait (asyncio's own bound)."""
SEE_OFF_S = 0.5
"""How long a gateway that stops keeps idle connections: a caller's next request is answered, and leaves in order."""


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


class IdleTime:
    """How long a connection has been without a request.

    In place of a task that Hypercorn begins whenever there is none (`restart`), and that the next one ends (`stop`): it
    would close the connection when its time is up, or the server stops. That takes two tasks and a timer for each
    request, and Hypercorn waits for such a task even when the client has gone. Here it begins when it has something to
    do.

    idle  of the connections that have no request
    """

    def __init__(self, idle: set[IdleTime]) -> None:
        self._idle = idle
        self._close: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def restart(self, _tasks: object, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """It has no request any more. Takes what Hypercorn calls it with."""
        self._close = close
        self._idle.add(self)
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.end)

    async def stop(self) -> None:
        """It has one, or is closed."""
        self._idle.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """Closes the connection, which is one of the idle ones."""
        assert self._close is not None, "it is idle"
        self._closing = asyncio.get_running_loop().create_task(self._close(), name="idle connection")


class Connection(TCPServer):
    """One client's connection. To Hypercorn's own a client that does not take its answer is worth waiting for for ever;
    to this one it has left when it is slower than a body may come (`rest.body`)."""

    async def protocol_send(self, event: Event) -> None:
        """Does what the protocol wants."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            try:
                self.writer.write(event.data)
                await self._taken()
            except (ConnectionError, RuntimeError, TimeoutError):
                self.writer.transport.abort()
                await self.protocol.handle(Closed())

    async def _taken(self) -> None:
        """Returns when the client has all but a small rest. Raises TimeoutError."""
        transport = self.writer.transport
        size = transport.get_write_buffer_size()
        if size <= WRITE_AHEAD_BYTES:
            # Nothing to wait for, and so no need of a timer.
            await self.writer.drain()
            return
        began = self.loop.time()
        deadline = began + PATIENCE_S
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.writer.drain()
                    return
            except TimeoutError:
                earned = began + PATIENCE_S + (size - transport.get_write_buffer_size()) / SLOWEST_BYTES_S
                if earned <= deadline:
                    raise
                deadline = earned

    async def _close(self) -> None:
        last_chance = self.loop.call_later(PATIENCE_S, self.writer.transport.abort)
        try:
            await super()._close()
        finally:
            last_chance.cancel()

    async def _initiate_server_close(self) -> None:
        await super()._initiate_server_close()
        # The rest of an answer may still be taken; until then the connection does not end.
        self.loop.call_later(PATIENCE_S, self.writer.transport.abort)


class HttpServer:
    """Serves an ASGI application. Does what Hypercorn's own `serve` does, which can only stop at once."""

    def __init__(self, app: Any, certificate: Certificate | None = None) -> None:
        """Raises OSError (ssl.SSLError is one) for a certificate that cannot be read."""
        self._app = ASGIWrapper(app)
        self._config = configured(certificate)
        self._tls = self._config.create_ssl_context() if self._config.ssl_enabled else None
        self._context = WorkerContext(None)
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: set[IdleTime] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        """Accepts connections; the socket becomes the server's, which closes it."""
        self._listener = await asyncio.start_server(self._serve, sock=listening, backlog=BACKLOG, ssl=self._tls)

    async def stop(self, grace_s: float, *, see_off_s: float = SEE_OFF_S) -> None:
        """Sees the callers off: accepts no connection, serves what arrives on those there are, and closes each with
        its next response, which says so (`Connection: close`), or else after a moment.

        grace_s    seconds until requests that are still unanswered are cut off
        see_off_s  seconds until connections without a request are closed
        """
        assert self._listener is not None, "it was started"
        self._listener.close()
        # Hypercorn counts each connection's requests; from now on every one is one too many.
        self._config.keep_alive_max_requests = 0
        begin = time.monotonic()
        await self._gone(min(see_off_s, grace_s))
        await self._context.terminated.set()  # from now on none becomes idle any more
        for connection in self._idle:
            connection.end()
        await self._gone(max(0.0, grace_s - (time.monotonic() - begin)))
        await end(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        if self._context.terminated.is_set():
            writer.close()
            return
        loop = asyncio.get_running_loop()
        connection = Connection(self._app, loop, self._config, self._context, {}, reader, writer)
        connection.idle_task = IdleTime(self._idle)  # pyright: ignore[reportAttributeAccessIssue]
        await connection

    async def _gone(self, patience_s: float) -> None:
        """Returns when there is no connection, or after so many seconds."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=patience_s)


def configured(certificate: Certificate | None) -> Config:
    """What Hypercorn is told."""
    config = Config()
    # When it is asked how long, the time is up (`IdleTime`).
    config.keep_alive_timeout = 0
    config.keep_alive_max_requests = UNLIMITED
    # Unbounded: with a bound, a connection whose request was refused before its body was read would hang for ever in
    # putting the rest into the queue. What is read of a body is bounded by the endpoint (`rest.body`).
    config.max_app_queue_size = 0
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn")
    if certificate is not None:
        config.certfile, config.keyfile = certificate.certificate, certificate.key
        config.alpn_protocols = ["http/1.1"]
        if certificate.root:
            config.ca_certs = certificate.root
            config.verify_mode = ssl.CERT_REQUIRED
    return config
