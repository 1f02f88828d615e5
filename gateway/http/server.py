"""The HTTP server of a gateway: bounds its connections, and answers clients before it stops.

Configuration and TLS are Hypercorn's. Its own `serve` has no such bounds and no such stop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import ECONNABORTED
from functools import partial
from http import HTTPStatus
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from gateway.bounds.clients import CROWDED, PATIENCE_S
from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.http.connection import HEAD_S, Connection
from gateway.http.hypercorn_connection import HypercornConnection
from gateway.http.llhttp_connection import LlhttpConnection
from gateway.http.seats import Seat, Share, client_of
from gateway.ports.listening import quieten
from gateway.settings import GatewaySettings, HttpParser
from shared.process import logs
from shared.process.lifecycle import end

SEE_OFF_S = 0.5
"""How long a gateway that stops keeps idle connections open. A client's next request in this time is answered, and its
answer tells the client to close the connection."""
CHECK_S = 1.0
"""Pause between two checks for clients that are too slow."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection could not be accepted because descriptors or memory ran out."""
TELL_S = 60.0
"""Shortest time between two log lines about refused connections."""

CONNECTIONS: Mapping[HttpParser, Callable[[Any, Config, WorkerContext, Seat, UnreadAnswers], Connection]] = {
    "llhttp": LlhttpConnection,
    "hypercorn": HypercornConnection,
}
"""The connections of each setting `--http-parser`."""


@dataclass(frozen=True, slots=True)
class Served:
    """Connections that are served alike.

    app    ASGI application
    share  their seats
    once   each connection is closed with its first answer
    """

    app: Any
    share: Share
    once: bool = False


class HttpServer:
    """Serves ASGI applications on one port.

    A connection is served by the first of `served` that has a seat for it. If none has, it is closed.
    """

    def __init__(
        self,
        *served: Served,
        parser: HttpParser = "llhttp",
        settings: GatewaySettings | None = None,
        unread: UnreadAnswers | None = None,
    ) -> None:
        """settings: those of TLS count; None: plain text.

        Raises OSError (ssl.SSLError is one) for a certificate that cannot be read.
        """
        self._served = served
        self._unread = unread or UnreadAnswers(UNLIMITED)
        self._config = configured(settings)
        self._config_once = configured(None)
        self._config_once.keep_alive_max_requests = 0
        self._tls = self._config.create_ssl_context() if self._config.ssl_enabled else None
        self._context = WorkerContext(None)
        self._connect = CONNECTIONS[parser]
        self._connections: dict[asyncio.Task[None], Connection | None] = {}
        self._left_at: float | None = None
        self._tell_at = 0.0
        self._listening: socket.socket | None = None
        self._port = 0
        self._accepting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """Begins to accept connections. The server owns the socket from now on, and closes it."""
        loop = asyncio.get_running_loop()
        self._listening = listening
        self._port = listening.getsockname()[1]
        self._accepting = loop.create_task(self._accept(listening), name="http accept")
        self._checking = loop.create_task(self._check(), name="http check")

    async def stop(self, grace_s: float, *, see_off_s: float = SEE_OFF_S) -> None:
        """Accepts what clients have connected already, answers the requests on open connections, then closes them.

        Each open connection is closed with its next response, which says `Connection: close`; one without a request is
        closed after `see_off_s`. A client that is slow to send or read has less time than usual (LEAVING_PATIENCE_S).

        grace_s    seconds until unanswered requests are cut off
        see_off_s  seconds until connections without a request are closed
        """
        assert self._listening is not None and self._accepting is not None and self._checking is not None
        # A connection is closed when it has served more requests than this: from now on, with the next response.
        self._config.keep_alive_max_requests = 0
        if see_off_s and not self._accepting.done():
            await quieten(self._listening)
        await end([self._accepting])
        self._listening.close()
        self._left_at = asyncio.get_running_loop().time()
        begin = time.monotonic()
        await self._gone(min(see_off_s, grace_s))
        # From now on a connection is closed instead of becoming idle again.
        await self._context.terminated.set()
        for task, connection in self._connections.items():
            if connection is None:
                task.cancel()
            else:
                connection.see_off()
        await self._gone(max(0.0, grace_s - (time.monotonic() - begin)))
        await end([self._checking, *self._connections])

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno == ECONNABORTED:
                    continue
                self._tell("connections cannot be accepted", error=str(error))
                self._served[0].share.relieve(loop.time())
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                try:
                    self._welcome(accepted, client_of(address[0]))
                except Exception as error:  # noqa: BLE001  as in `_serve`
                    accepted.close()
                    logs.error("http connection failed unexpectedly", error)

    def _welcome(self, accepted: socket.socket, client: str) -> None:
        loop = asyncio.get_running_loop()
        for served in self._served:
            seat = served.share.take(client, loop.time(), HEAD_S)
            if seat is not None:
                task = loop.create_task(self._serve(served, seat, accepted), name="http connection")
                # While the connection is being opened (TLS), it can be ended only by cancelling its task.
                seat.end = task.cancel
                self._connections[task] = None
                task.add_done_callback(self._connections.pop)
                return
            share = served.share
            bounds = {"most": share.connections_max, "per_client": share.per_client, "so_far": share.refused}
            self._tell("connections refused", client=client, **bounds)
        accepted.close()

    async def _serve(self, served: Served, seat: Seat, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            config = self._config_once if served.once else self._config
            connection = self._connect(served.app, config, self._context, seat, self._unread)
            transport = await self._opened(accepted, connection.protocol)
            seat.end = partial(connection.end, HTTPStatus.SERVICE_UNAVAILABLE, CROWDED)
            self._connections[task] = connection
            await connection.run(transport)
        except OSError:
            pass  # the TLS handshake failed: a client's fault, not worth the log
        except Exception as error:  # noqa: BLE001  one connection's failure is nobody else's
            logs.error("http connection failed unexpectedly", error)
        finally:
            accepted.close()
            seat.leave()

    async def _opened(self, accepted: socket.socket, protocol: asyncio.Protocol) -> asyncio.Transport:
        """The connection's transport. `asyncio.start_server` has no place for a bound."""
        loop = asyncio.get_running_loop()
        times = {} if self._tls is None else {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": PATIENCE_S}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls, **times)
        return transport

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(CHECK_S)
            for connection in list(self._connections.values()):
                try:
                    if connection is not None:
                        connection.check(now(), self._left_at)
                except Exception as error:  # noqa: BLE001  as in `_serve`
                    logs.error("http connection failed unexpectedly", error)

    def _tell(self, event: str, **fields: object) -> None:
        """Logs a warning, at most one in TELL_S seconds."""
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            logs.warning(event, None, port=self._port, **fields)

    async def _gone(self, patience_s: float) -> None:
        """Returns when every connection has ended, or after `patience_s`."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=patience_s)


def configured(settings: GatewaySettings | None) -> Config:
    config = Config()
    config.keep_alive_max_requests = UNLIMITED
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn")
    if settings is not None and settings.http_server_cert:
        config.certfile, config.keyfile = settings.http_server_cert, settings.http_server_key
        config.alpn_protocols = ["http/1.1"]
        if settings.http_root_cert:
            config.ca_certs = settings.http_root_cert
            config.verify_mode = ssl.CERT_REQUIRED
    return config
