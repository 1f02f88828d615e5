"""The HTTP server of a gateway. Configuration and TLS are Hypercorn's, whose own `serve` has no bounds for connections
and no stop that answers its clients."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from gateway.bounds.clients import PATIENCE_S
from gateway.bounds.descriptors import LEAVING
from gateway.bounds.memory import largest
from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.http.connection import HEAD_S, Connection
from gateway.http.hypercorn_connection import HypercornConnection
from gateway.http.llhttp_connection import LlhttpConnection
from gateway.ports.listening import HTTP_PORT
from gateway.ports.seats import Seat, Share
from gateway.ports.serving import PortServer
from gateway.ports.tls import tls_context
from gateway.ports.turns import LoopTurns
from gateway.settings import GatewaySettings, HttpParser
from shared.process import logs

CONNECTIONS: Mapping[HttpParser, Callable[[Any, Config, WorkerContext, Seat, UnreadAnswers, LoopTurns], Connection]] = {
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


class HttpServer(PortServer[Connection]):
    """Serves ASGI applications on one port: each connection by the first of `served` that has a seat for it.

    When it stops, each open connection is closed with its next response, which says `Connection: close`. A client that
    is slow to send or read has less time than usual then (LEAVING_PATIENCE_S).
    """

    def __init__(
        self,
        *served: Served,
        parser: HttpParser = "llhttp",
        settings: GatewaySettings | None = None,
        unread: UnreadAnswers | None = None,
    ) -> None:
        """settings: those of TLS count; None: plain text.

        Raises as `tls_context`.
        """
        self._served = {one.share: one for one in served}
        self._unread = unread or UnreadAnswers(UNLIMITED)
        self._config = configured()
        self._config_once = configured()
        self._config_once.keep_alive_max_requests = 0
        self._context = WorkerContext(None)
        self._connect = CONNECTIONS[parser]
        super().__init__(
            "http",
            [one.share for one in served],
            http_tls(settings),
            first_s=HEAD_S,
            end_s=PATIENCE_S,
            leaving_max=LEAVING,
        )

    def relieve(self, excess: int) -> int:
        """Gives memory of what clients have sent ahead back: closes the connections that keep most of it. Returns how
        many bytes that is."""
        ahead = {connection: connection.ahead_bytes for connection in self._connections()}
        chosen = largest(ahead, excess)
        for connection in chosen:
            connection.cut()
        given = sum([ahead[connection] for connection in chosen])
        if chosen:
            logs.warning("memory is short, connections are closed", connections=len(chosen), waiting_bytes=given)
        return given

    def _connection(self, seat: Seat) -> Connection:
        served = self._served[seat.share]
        config = self._config_once if served.once else self._config
        return self._connect(served.app, config, self._context, seat, self._unread, self._turns)

    def _leave(self) -> None:
        # A connection is closed when it has served more requests than this: from now on, with the next response.
        self._config.keep_alive_max_requests = 0

    async def _close(self) -> None:
        await self._context.terminated.set()


def configured() -> Config:
    config = Config()
    config.keep_alive_max_requests = UNLIMITED
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn")
    return config


def http_tls(settings: GatewaySettings | None) -> ssl.SSLContext | None:
    """The port's TLS; None: plain text. Raises as `tls_context`."""
    if settings is None or not settings.http_server_cert:
        return None
    cert, key, ca = settings.http_server_cert, settings.http_server_key, settings.http_root_cert
    return tls_context(HTTP_PORT, cert, key, ca, protocol="http/1.1", asks_clients=bool(ca))
