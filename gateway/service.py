"""The gateway's composition root: builds the parts, serves both protocols, and stops without losing an answer.

`running_core` starts the background tasks. The main ones: `dispatch` sends requests to Redis, `replies` reads the
answers, `heartbeat` keeps the reply streams alive, `orphans` tells Redis of sequences whose client has left, `catalog`
watches the mesh. If a task fails, the whole gateway ends. That loses no state: a gateway holds only waiting requests,
and clients go on through another gateway.

How a gateway stops: it reports that it is not ready, and closes its ports to new connections. Requests on connections
that are open are served, also those that begin a sequence, but clients are told to go elsewhere. Each connection is
closed when it has nothing to do. When the grace is over, the requests that still wait fail with an error that says that
their outcome is unknown.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from starlette.routing import Router

from gateway.access.restrictions import Restriction
from gateway.bounds import descriptors
from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import MemoryBound
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.call_address import call_address
from gateway.exposure import Exposure
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.http.seats import Share
from gateway.http.server import HttpServer, Served
from gateway.models.catalog import Catalog
from gateway.models.metrics import Gauge, Metrics
from gateway.models.observation import Observation
from gateway.models.repository import RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from gateway.models.statistics import Statistics
from gateway.ports.listening import listen
from gateway.ports.sharing import PortShare, SharedPorts, sharing
from gateway.requests.allowances import Allowances
from gateway.requests.dispatch import Dispatch
from gateway.requests.ensembles.notices import EnsembleNotices
from gateway.requests.inference import Inference
from gateway.requests.measures import Measures
from gateway.requests.orphans import Orphans
from gateway.requests.recovery import RestartRecovery
from gateway.requests.region_folder import RegionFolder
from gateway.requests.regions import REGIONS_MAX, Regions
from gateway.requests.replies import Replies
from gateway.requests.unserved import Unserved
from gateway.rest.app import build_app, build_crowded_app, build_metrics_app
from gateway.rest.body import BodyBounds
from gateway.rest.generate import Generate
from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.observability import Observability
from gateway.rest.receiver import Receiver
from gateway.rest.sequences import SequenceRoutes
from gateway.rest.server import ServerRoutes
from gateway.rest.shared_memory import SystemSharedMemory
from gateway.settings import GatewaySettings
from shared.contract.ids import GatewayId
from shared.contract.response_cache import parse_cache_config
from shared.contract.tenants import TenantLimits
from shared.origins import Origins, is_loopback
from shared.process import logs
from shared.process.lifecycle import Stop, Tasks
from shared.statistics.metrics_config import parse_metrics_config
from shared.store.commands import Redis
from shared.store.company import Company
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.metering import Metering
from shared.store.reading import tell
from shared.store.redis_client import connect, joined, value_bytes_max
from shared.store.redis_url import url_without_password
from shared.store.scripts import Drawn, Scripts
from shared.store.sequences import Sequences
from shared.store.server_run import ServerRun
from shared.store.tenants import KnownTenants, StoredTenants
from shared.store.totals import Tallies
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.tracing import Tracing, setup

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


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that both protocols use."""

    inference: Inference
    catalog: Catalog
    repository: RepositoryControl
    statistics: Statistics
    observation: Observation
    dispatch: Dispatch
    replies: Replies
    settings: RuntimeSettings
    sequences: Sequences
    memory: MemoryBound
    unread: UnreadAnswers
    company: Company
    metering: Metering


async def serve(
    settings: GatewaySettings,
    tasks: Tasks,
    stop: Stop,
    *,
    on_ready: Callable[[ListeningPorts], None] | None = None,
    grace_s: float | None = None,
) -> None:
    """Runs a gateway until it is told to stop.

    on_ready  called when every port is open
    grace_s   replaces the setting `exit_timeout_secs`
    """
    settings = settings.bounded()
    name = settings.name_of("gateway")
    # Waits for Redis and checks that it fits this mesh; the connections in use are made below.
    async with joined(settings.redis_url, settings.key_prefix, settings.shards, name=name) as (_, keys):
        pass
    tracing = setup("gateway", name)
    try:
        async with running_core(settings, name, keys, tracing, tasks) as core, AsyncExitStack() as opened:
            patience_s = settings.exit_timeout_secs if grace_s is None else grace_s
            await _serve_ports(settings, core, tasks, stop, on_ready, patience_s, opened)
    finally:
        await asyncio.to_thread(tracing.shutdown)


@asynccontextmanager
async def running_core(
    settings: GatewaySettings, name: str, keys: Keyspace, tracing: Tracing, tasks: Tasks
) -> AsyncGenerator[Core]:
    """Runs the core with its background tasks. On leaving, the tasks end and this gateway's keys are removed."""

    def open_client(run: ServerRun) -> Redis:
        # No retries in the client: only `dispatch` knows whether a request may be sent twice.
        timeout_ms = settings.redis_timeout_ms
        return connect(settings.redis_url, retries=0, name=name, timeout_ms=timeout_ms, run=run)

    run = ServerRun()
    async with aclosing(open_client(run)) as redis:
        gateway = GatewayId(f"{'-'.join(name.split())}-{uuid.uuid4().hex[:8]}")
        membership = Membership(redis, keys)
        catalog = Catalog(membership, strict_readiness=settings.strict_readiness)
        where = json.dumps({"name": name, "host": socket.gethostname(), "pid": os.getpid()})
        replies = Replies(redis, keys, gateway, where=where)
        measures = Measures()
        scripts = Scripts(redis, keys, trips=measures.trips)
        metering = Metering(scripts, keys, measures.meters)
        tenants = KnownTenants(StoredTenants(redis, keys))

        async def draw(tenant: str, limits: TenantLimits, wanted: int) -> Drawn:
            return await scripts.run(scripts.draw(tenant, limits, wanted))

        allowances = Allowances(lambda: tenants.now, draw)
        dispatch = Dispatch(
            redis,
            scripts,
            keys,
            replies,
            gateway,
            in_flight_max=settings.sequence_inflight_max,
            backlog_max=settings.backlog_max,
            live_max=settings.live_max,
            early_wait_s=settings.early_step_wait_ms / 1000,
            tenants=lambda: tenants.now,
            summaries=parse_metrics_config(settings.metrics_config).summary_latencies,
        )
        cache_bytes = parse_cache_config(settings.cache_config)
        observation = Observation(redis, keys, catalog, cache_bytes=cache_bytes)
        statistics = Statistics(Tallies(scripts, keys), catalog, observation)
        orphans = Orphans(scripts, keys, gateway)
        notices = EnsembleNotices(scripts, keys)
        memory = MemoryBound(settings.memory_max)
        unread = UnreadAnswers(settings.max_bytes_unread)
        inference = Inference(
            catalog,
            dispatch,
            replies,
            keys,
            tracing,
            orphans,
            notices,
            in_flight_max=settings.max_requests_in_flight,
            budget=ByteBudget(settings.max_bytes_in_flight, memory),
            unread=unread,
            request_bytes_max=await value_bytes_max(redis),
            timeout_ms=settings.request_timeout_ms,
            cache_bytes=cache_bytes,
            measures=measures,
            allowances=allowances,
        )
        stored_settings = StoredSettings(redis, keys)
        process = ProcessSettings(stored_settings, tracing.control, logs.Level[settings.log_level.upper()])
        company = Company(redis, keys, "gateway", name)
        await replies.open()
        await catalog.refresh()
        await tenants.refresh()
        background = [
            tasks.start(replies.run(), name="replies"),
            tasks.start(replies.heartbeat(), name="heartbeat"),
            tasks.start(dispatch.run(), name="dispatch"),
            tasks.start(dispatch.waits.run(), name="waits for slots"),
            tasks.start(RestartRecovery(open_client, run, replies, dispatch).run(), name="recovery"),
            tasks.start(orphans.run(), name="orphans"),
            tasks.start(notices.run(), name="ensembles"),
            tasks.start(catalog.run(), name="catalog"),
            tasks.start(Unserved(catalog, lambda: replies.unanswered, dispatch.withdraw).run(), name="unserved"),
            tasks.start(process.run(), name="settings"),
            tasks.start(tenants.run(), name="tenants"),
            tasks.start(tell(redis, keys), name="unreadable values"),
            tasks.start(company.run(), name="company"),
            tasks.start(metering.run(), name="measurements"),
            tasks.start(memory.run(), name="memory"),
        ]
        try:
            yield Core(
                inference,
                catalog,
                RepositoryControl(redis, keys, catalog),
                statistics,
                observation,
                dispatch,
                replies,
                RuntimeSettings(stored_settings, process, tracing.control, catalog, name),
                Sequences(redis, keys, membership),
                memory,
                unread,
                company,
                metering,
            )
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await replies.close()


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
        metrics = stack.enter_context(listen(settings.host, settings.metrics_port))
        http = stack.enter_context(listen(settings.host, settings.http_port, is_shared=settings.reuse_port))
        yield OpenPorts(http, metrics, share)


async def _serve_ports(
    settings: GatewaySettings,
    core: Core,
    tasks: Tasks,
    stop: Stop,
    on_ready: Callable[[ListeningPorts], None] | None,
    grace_s: float,
    opened: AsyncExitStack,
) -> None:
    """Opens the ports, which end with `opened`, and serves until the gateway is told to stop."""
    ports = await opened.enter_async_context(_opened(settings))
    shares = descriptors.shares(
        descriptors.raise_limit(),
        http=settings.http_max_connections,
        http_per_client=settings.http_max_connections_per_client,
        grpc=settings.grpc_max_connections,
        regions=REGIONS_MAX if settings.allow_client_shm else 0,
    )
    regions = Regions(
        is_allowed=settings.allow_client_shm,
        key_prefix=settings.client_shm_prefix,
        bytes_max=max(settings.http_max_input_size, settings.grpc_max_input_size),
        budget=core.inference.budget,
        shared=RegionFolder(ports.share.folder / "regions") if ports.share is not None else None,
    )
    if ports.share is not None:
        tasks.start(regions.run(), name="regions")
    http_share = Share(shares.http, shares.http_per_client)
    exposure = Exposure(settings, is_loopback(ports.http.getsockname()[0]))
    exposure.warn()
    tasks.start(exposure.warn_of_model_control(core.catalog), name="exposure")
    applications = _applications(settings, core, stop, exposure, regions, http_share)
    stop.started()
    servicer = InferenceServicer(
        core.inference,
        core.catalog,
        _repository(core, exposure, settings.grpc_restrictions),
        core.statistics,
        core.settings,
        settings,
        memory=core.memory,
        unread=core.unread,
        regions=regions,
    )
    grpc = await serve_grpc(servicer, settings, connections_max=shares.grpc)
    # The second relief: the servicer's own, which ends calls with unfinished messages, is asked before it.
    core.memory.reliefs.append(core.unread.relieve)
    addresses = ListeningPorts(ports.http.getsockname()[1], grpc.port, ports.metrics.getsockname()[1])
    http_server = HttpServer(
        Served(applications.of_http, http_share),
        Served(applications.of_crowd, Share(descriptors.SPARE, descriptors.SPARE // 2), once=True),
        parser=settings.http_parser,
        settings=settings,
        unread=core.unread,
    )
    await http_server.start(ports.http)
    metrics_share = Share(descriptors.METRICS, descriptors.METRICS)
    metrics_server = HttpServer(Served(applications.of_metrics, metrics_share), parser=settings.http_parser)
    await metrics_server.start(ports.metrics)
    logs.info(
        "gateway ready",
        host=settings.host,
        http=addresses.http_port,
        grpc=addresses.grpc_port,
        metrics=addresses.metrics_port,
    )
    core.company.takes_calls(await asyncio.to_thread(call_address, settings, grpc.port))
    if ports.share is not None:
        ports.share.opened()
    if on_ready is not None:
        on_ready(addresses)
    try:
        await stop.wait()
        await _drain(core, grpc, http_server, grace_s)
    except BaseException:
        # A background task has failed, or the process was told to end without a grace.
        core.replies.give_up("the gateway has ended before its time")
        await asyncio.gather(grpc.stop(LAST_WORD_S), http_server.stop(LAST_WORD_S))
        raise
    finally:
        # The metrics port answers until the other ports have closed.
        await asyncio.gather(http_server.stop(LAST_WORD_S), metrics_server.stop(LAST_WORD_S, see_off_s=0.0))


async def _drain(core: Core, grpc: GrpcServer, http: HttpServer, grace_s: float) -> None:
    """Takes leave of all clients. Requests that are not answered within the grace fail."""
    core.inference.stopping = True
    core.company.takes_calls("")
    logs.info("draining", in_flight=core.inference.in_flight)
    # Requests without an answer at the end of the grace fail then. The servers stop LAST_WORD_S later, so that the
    # errors still reach the clients.
    last_word = asyncio.get_running_loop().call_later(grace_s, core.replies.give_up, "the gateway has stopped")
    await asyncio.gather(grpc.stop(grace_s + LAST_WORD_S), http.stop(grace_s + LAST_WORD_S))
    last_word.cancel()


class _Applications(NamedTuple):
    """Of the HTTP port, of its connections beyond the bound, and of the metrics port."""

    of_http: Router
    of_crowd: Router
    of_metrics: Router


def _applications(
    settings: GatewaySettings, core: Core, stop: Stop, exposure: Exposure, regions: Regions, http: Share
) -> _Applications:
    config = parse_metrics_config(settings.metrics_config)
    page = Metrics(core.catalog, core.statistics, core.observation, gauges_of(core, http), config, core.metering)
    server = ServerRoutes(core.catalog, page, stop, name=settings.server_id, shared_memory=settings.allow_client_shm)
    bounds = BodyBounds(settings.http_max_input_size, core.inference.budget)
    receiver = Receiver(core.inference, size_max=bounds.size_max, forward=settings.header_forward_regex)
    origins = Origins(settings.http_allowed_origin, is_loopback=exposure.is_loopback)
    restrictions = settings.http_restrictions
    of_http = build_app(
        Infer(core.inference, core.catalog, receiver, regions),
        Generate(core.inference, core.catalog, receiver),
        Models(core.catalog, _repository(core, exposure, restrictions), core.statistics, bounds),
        server,
        Observability(core.settings, bounds),
        SequenceRoutes(core.catalog, core.sequences, bounds, is_open=exposure.shows_sequences(restrictions)),
        SystemSharedMemory(regions, bounds),
        origins,
        restrictions,
    )
    of_crowd = build_crowded_app(server, origins, restrictions)
    return _Applications(of_http, of_crowd, build_metrics_app(server, origins, settings.restrictions))


def _repository(core: Core, exposure: Exposure, restrictions: Mapping[str, Restriction]) -> RepositoryControl:
    """Where models are loaded and unloaded; without overrides of configurations where everybody could send them."""
    return core.repository if exposure.takes_overrides(restrictions) else core.repository.without_overrides()


def gauges_of(core: Core, http: Share) -> list[Gauge]:
    """The metrics of this gateway process alone."""
    return [
        Gauge(
            "seqmesh_gateway_requests_in_flight",
            "gauge",
            "Requests of this gateway that wait for an answer",
            lambda: core.inference.in_flight,
        ),
        Gauge(
            "seqmesh_gateway_submitted_total",
            "counter",
            "Requests, and withdrawals of requests, in the round trips of seqmesh_gateway_round_trips_total",
            lambda: core.dispatch.sent,
        ),
        Gauge(
            "seqmesh_gateway_round_trips_total",
            "counter",
            "Round trips in which this gateway sent requests or withdrawals, and Redis answered",
            lambda: core.dispatch.round_trips,
        ),
        Gauge(
            "seqmesh_gateway_http_connections",
            "gauge",
            "Connections of clients to this gateway's HTTP port",
            lambda: http.taken,
        ),
        Gauge(
            "seqmesh_gateway_http_connections_refused_total",
            "counter",
            "Connections beyond the bounds of this gateway's HTTP port, which were answered health checks alone",
            lambda: http.refused,
        ),
    ]
