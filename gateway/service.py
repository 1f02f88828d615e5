"""The gateway's composition root: builds the parts, serves both protocols, and stops without losing an answer.

How a gateway stops: it reports that it is not ready, and closes its ports to new connections. Requests on connections
that are open are served, also those that begin a sequence, but clients are told to go elsewhere. Each connection is
closed when it has nothing to do. When the grace is over, the requests that still wait fail with an error that says that
their outcome is unknown.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from gateway.applications import applications, gauges_of, repository_of
from gateway.bounds import descriptors
from gateway.call_address import call_address
from gateway.exposure import Exposure
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.http.server import HttpServer, Served
from gateway.parts import GatewayParts, running_parts
from gateway.ports.listening import METRICS_PORT, listen
from gateway.ports.seats import Share, of_one_client
from gateway.ports.sharing import PortShare, SharedPorts, sharing
from gateway.requests.region_folder import RegionFolder
from gateway.requests.regions import REGIONS_MAX, Regions
from gateway.settings import GatewaySettings
from shared.origins import is_loopback
from shared.process import logs
from shared.process.lifecycle import Stop, Tasks
from shared.process.machine import raise_open_files
from shared.store.agreement import joined
from shared.store.connections.redis_url import url_without_password
from shared.traces.tracing import setup

LAST_WORD_S = 1.0
"""At the end of the grace the waiting requests fail. This is how long their errors may take to reach the clients."""


@dataclass(frozen=True, slots=True)
class ListeningPorts:
    """The ports that a gateway listens on; where a setting is 0, the port that the system chose."""

    http_port: int
    grpc_port: int
    metrics_port: int


@dataclass(frozen=True, slots=True)
class OpenPorts:
    """Listening sockets. share: this gateway's share in its HTTP and its gRPC port; None if it shares none"""

    http: socket.socket
    metrics: socket.socket
    share: PortShare | None


async def serve(
    settings: GatewaySettings,
    tasks: Tasks,
    stop: Stop,
    *,
    on_ready: Callable[[ListeningPorts], None] | None = None,
) -> None:
    """Runs a gateway until it is told to stop. on_ready: called when every port is open"""
    settings = settings.bounded()
    name = settings.name_of("gateway")
    # Waits for Redis and checks that it fits this mesh; the connections in use are made below.
    async with joined(settings.redis_url, settings.key_prefix, settings.shards, name=name) as (_, keys):
        pass
    tracing = setup("gateway", name)
    try:
        async with running_parts(settings, name, keys, tracing, tasks) as parts, _opened(settings) as ports:
            await _serve_ports(settings, parts, ports, tasks, stop, on_ready)
    finally:
        await asyncio.to_thread(tracing.shutdown)


@asynccontextmanager
async def _opened(settings: GatewaySettings) -> AsyncGenerator[OpenPorts]:
    """The ports of HTTP and of the metrics, open within the block. Their servers may close them earlier."""
    async with AsyncExitStack() as stack:
        share = None
        if settings.reuse_port:
            mesh = f"{url_without_password(settings.redis_url)} {settings.key_prefix}"
            agreed = SharedPorts(settings.host, settings.http_port, settings.grpc_port, mesh)
            share = await stack.enter_async_context(sharing(agreed))
        # The shared port comes last: a gateway that ends here must not have been given connections.
        metrics = stack.enter_context(listen(settings.host, settings.metrics_port, of=METRICS_PORT))
        http = stack.enter_context(listen(settings.host, settings.http_port, is_shared=settings.reuse_port))
        yield OpenPorts(http, metrics, share)


async def _serve_ports(
    settings: GatewaySettings,
    parts: GatewayParts,
    ports: OpenPorts,
    tasks: Tasks,
    stop: Stop,
    on_ready: Callable[[ListeningPorts], None] | None,
) -> None:
    """Serves until the gateway is told to stop."""
    regions = _regions(settings, parts, ports.share)
    if ports.share is not None:
        tasks.start(regions.run(), name="regions")
    exposure = Exposure(settings, is_loopback(ports.http.getsockname()[0]))
    exposure.warn()
    tasks.start(exposure.warn_of_model_control(parts.catalog), name="exposure")
    http, grpc, metrics = await _servers(settings, parts, stop, ports, exposure, regions)
    for name, server in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        tasks.start(server.watched(), name=f"{name} port")
    logs.info("gateway ready", host=settings.host, http=http.port, grpc=grpc.port, metrics=metrics.port)
    if ports.share is not None:
        ports.share.opened()
    if on_ready is not None:
        on_ready(ListeningPorts(http.port, grpc.port, metrics.port))
    telling = tasks.start(_tell_address(settings, parts, grpc.port), name="own address")
    try:
        await stop.wait()
        telling.cancel()
        await _drain(parts, http, grpc, settings.exit_timeout_secs)
    except BaseException:
        # A background task has failed, or the process was told to end without a grace.
        parts.inference.give_up("the gateway has ended before its time")
        await asyncio.gather(grpc.stop(LAST_WORD_S), http.stop(LAST_WORD_S))
        raise
    finally:
        # The metrics port answers until the other ports have closed.
        await asyncio.gather(http.stop(LAST_WORD_S), metrics.stop(LAST_WORD_S, see_off_s=0.0))


async def _tell_address(settings: GatewaySettings, parts: GatewayParts, grpc_port: int) -> None:
    """Tells executors where they reach this gateway. To find that out may take long, where a name server is asked."""
    parts.company.takes_calls(await asyncio.to_thread(call_address, settings, grpc_port))


def _regions(settings: GatewaySettings, parts: GatewayParts, share: PortShare | None) -> Regions:
    return Regions(
        is_allowed=settings.allow_client_shm,
        key_prefix=settings.client_shm_prefix,
        bytes_max=max(settings.http_max_input_size, settings.grpc_max_input_size),
        budget=parts.inference.budget,
        shared=RegionFolder(share.folder / "regions") if share is not None else None,
    )


async def _servers(
    settings: GatewaySettings, parts: GatewayParts, stop: Stop, ports: OpenPorts, exposure: Exposure, regions: Regions
) -> tuple[HttpServer, GrpcServer, HttpServer]:
    """The servers of HTTP, gRPC and the metrics, which take requests from now on."""
    shares = descriptors.shares(
        raise_open_files(),
        http=settings.http_max_connections,
        http_per_client=settings.http_max_connections_per_client,
        grpc=settings.grpc_max_connections,
        regions=REGIONS_MAX if settings.allow_client_shm else 0,
    )
    http_share = Share(shares.http, shares.http_per_client)
    stop.started()
    servicer = InferenceServicer(
        parts.inference,
        parts.catalog,
        repository_of(parts, exposure, settings.grpc_restrictions),
        parts.statistics,
        parts.settings,
        settings,
        memory=parts.memory,
        unread=parts.unread,
        regions=regions,
    )
    grpc = await serve_grpc(servicer, settings, connections_max=shares.grpc)
    gauges = gauges_of(parts, http_share, grpc)
    apps = applications(settings, parts, stop, exposure, regions, gauges)
    http = HttpServer(
        Served(apps.of_http, http_share),
        Served(apps.of_crowd, Share(descriptors.SPARE, descriptors.SPARE // 2), once=True),
        parser=settings.http_parser,
        settings=settings,
        unread=parts.unread,
    )
    # In this order: messages that are on their way go before answers that are made. Connections come last, for their
    # clients need others then.
    parts.memory.reliefs += [grpc.relieve, http.relieve, parts.unread.relieve, grpc.relieve_idle, http.relieve_idle]
    await http.start(ports.http)
    metrics = HttpServer(
        Served(apps.of_metrics, Share(descriptors.METRICS, of_one_client(descriptors.METRICS))),
        Served(apps.of_metrics_crowd, Share(descriptors.METRICS_SPARE, descriptors.METRICS_SPARE // 2), once=True),
        parser=settings.http_parser,
    )
    await metrics.start(ports.metrics)
    return http, grpc, metrics


async def _drain(parts: GatewayParts, http: HttpServer, grpc: GrpcServer, grace_s: float) -> None:
    """Takes leave of all clients. Requests that are not answered within the grace fail."""
    parts.inference.stopping = True
    parts.company.takes_calls("")
    logs.info("draining", in_flight=parts.inference.in_flight)
    # Requests without an answer at the end of the grace fail then. The servers stop LAST_WORD_S later, so that the
    # errors still reach the clients.
    last_word = asyncio.get_running_loop().call_later(grace_s, parts.inference.give_up, "the gateway has stopped")
    await asyncio.gather(grpc.stop(grace_s + LAST_WORD_S), http.stop(grace_s + LAST_WORD_S))
    last_word.cancel()
