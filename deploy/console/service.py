"""The console's composition root: opens the port, reads while somebody looks, stops."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any, cast

import click
from hypercorn.asyncio import serve as serve_http  # pyright: ignore[reportUnknownVariableType]
from hypercorn.config import Config

from deploy.console.access import Access
from deploy.console.actions import Actions
from deploy.console.app import ConsoleRoutes, Lookups, build_app, page_files
from deploy.console.live import LiveMesh
from deploy.console.reader import MeshReader
from deploy.console.settings import ConsoleSettings
from deploy.local.control import killable_executors
from deploy.local.embedded import family_of
from deploy.local.readiness import reachable
from deploy.operate.operating import located
from shared.contract.errors import UnavailableError
from shared.origins import Origins, is_loopback
from shared.process import logs
from shared.process.addresses import authority, remedy
from shared.process.lifecycle import Stop, Tasks
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_url import url_without_password
from shared.store.release import RELEASE

UNSENT_MS = 20_000
"""How long the kernel keeps bytes for a browser that takes none, before it closes the connection."""
GRACE_S = 1.0


async def serve(
    settings: ConsoleSettings, tasks: Tasks, stop: Stop, *, on_ready: Callable[[int, LiveMesh], None] | None = None
) -> None:
    """Runs a console until it is told to stop. on_ready: called with the port when it is open"""
    try:
        url, prefix = located(settings)
    except click.ClickException as error:
        raise UnavailableError(error.message) from error
    token = settings.console_token or secrets.token_urlsafe(16)
    listening = listen(settings.host, settings.console_port)
    host, port = listening.getsockname()[:2]
    redis = connect(url, retries=0, name="console")
    try:
        control = settings.control
        reader = MeshReader(redis, prefix)
        live = LiveMesh(reader, RELEASE, await killable_executors(control) if control else frozenset())
        access = Access(
            token,
            Origins(settings.console_allowed_origin, is_loopback=is_loopback(host), flag="--console-allowed-origin"),
            is_loopback(host),
        )
        app = build_app(ConsoleRoutes(access, live, reader, Lookups(), Actions(reader), control, stop), page_files())
        tasks.start(live.run(), name="live")
        stop.started()
        # Of a container it is the address on its machine, where the port is published as it is.
        where = f"http://{authority(reachable(settings.host), port)}/"
        if settings.console_token:
            # The token is known already, and need not stand in a log.
            logs.info("console ready", url=where, redis=url_without_password(url))
        else:
            logs.notice("console ready", url=f"{where}#token={token}", redis=url_without_password(url))
        if on_ready is not None:
            on_ready(port, live)
        await serve_http(cast("Any", app), config_of(listening), shutdown_trigger=stop.wait)
    finally:
        await redis.aclose()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UnavailableError when the address cannot be had."""
    try:
        listening = socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        raise UnavailableError(
            f"the console cannot listen on {host}:{port}: {error} ({remedy(error, '--console-port')})"
        ) from error
    listening.setblocking(False)  # noqa: FBT003  the socket module's own signature
    # Connections take it over. It also ends those that are open and not read, whatever the server waits for.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MS)
    return listening


def config_of(listening: socket.socket) -> Config:
    """Hypercorn on a socket that listens already."""
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.graceful_timeout = GRACE_S
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = 16 << 10
    config.alpn_protocols = ["http/1.1"]
    return config
