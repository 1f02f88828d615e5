"""Hypercorn, configured for a gateway: HTTP/1.1 by h11, connections that stay open, and a stop that answers first."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.asyncio
from hypercorn.config import Config
from starlette.types import Receive, Scope, Send

from gateway.settings import Certificate
from shared.errors import UnavailableError

KEEP_ALIVE_S = 600.0
"""A client's pool must not lose an idle connection while it is about to use it."""
BACKLOG = 1024
"""Connections that may wait to be accepted: a herd of clients that starts at once."""
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


async def serve_http(
    app: Any,
    server: socket.socket,
    *,
    stop: Callable[[], Awaitable[object]],
    grace_s: float,
    certificate: Certificate | None = None,
) -> None:
    """Serves an ASGI application on a listening socket until `stop` returns; then answers what is open.

    server   becomes Hypercorn's, which closes it
    grace_s  how long open requests may take once the stop was asked for
    raises   OSError (ssl.SSLError is one) for a certificate that cannot be read
    """
    config = Config()
    config.bind = [f"fd://{server.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = UNLIMITED
    config.graceful_timeout = grace_s
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
    library: Any = hypercorn.asyncio  # its `serve` is typed by dicts of unknown content
    await library.serve(_without_lifespan(app), config, shutdown_trigger=stop, mode="asgi")


def _without_lifespan(app: Any) -> Any:
    """The application for requests only. Its life is the service's: Starlette reports a cancelled one as a failure."""

    async def requests_only(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)

    return requests_only
