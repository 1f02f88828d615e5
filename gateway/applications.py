"""The ASGI applications of a gateway: of the HTTP port, of the metrics port, and of connections beyond their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starlette.routing import Router

from gateway.exposure import Exposure
from gateway.grpc.server import GrpcServer
from gateway.models.metrics import Gauge, Metrics
from gateway.models.repository import RepositoryControl
from gateway.parts import GatewayParts
from gateway.ports.seats import Share
from gateway.requests.regions import Regions
from gateway.rest.app import build_app, build_crowded_app, build_metrics_app
from gateway.rest.body import BodyBounds
from gateway.rest.encoding import Encoding
from gateway.rest.generate import Generate
from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.observability import Observability
from gateway.rest.receiver import Receiver
from gateway.rest.sequences import SequenceRoutes
from gateway.rest.server import ServerRoutes
from gateway.rest.shared_memory import SystemSharedMemory
from gateway.restrictions import Restriction
from gateway.settings import GatewaySettings
from shared.origins import Origins
from shared.process.cpu_policy import waited_s
from shared.process.lifecycle import Stop


class PortApplications(NamedTuple):
    """Of the HTTP port and of the metrics port; the crowds': of their connections beyond the bounds."""

    of_http: Router
    of_crowd: Router
    of_metrics: Router
    of_metrics_crowd: Router


def applications(
    settings: GatewaySettings,
    parts: GatewayParts,
    stop: Stop,
    exposure: Exposure,
    regions: Regions,
    gauges: Sequence[Gauge],
) -> PortApplications:
    page = Metrics(parts.catalog, parts.statistics, parts.observation, gauges, settings.metrics, parts.metering)
    server = ServerRoutes(parts.catalog, page, stop, name=settings.server_id, shared_memory=settings.allow_client_shm)
    bounds = BodyBounds(settings.http_max_input_size, parts.inference.budget)
    receiver = Receiver(parts.inference, size_max=bounds.size_max, forward=settings.header_forward_regex)
    encoding = Encoding()
    origins = Origins(settings.http_allowed_origin, is_loopback=exposure.is_loopback)
    restrictions = settings.http_restrictions
    of_http = build_app(
        Infer(parts.inference, parts.catalog, receiver, encoding, regions),
        Generate(parts.inference, receiver, encoding),
        Models(parts.catalog, repository_of(parts, exposure, restrictions), parts.statistics, bounds),
        server,
        Observability(parts.settings, bounds),
        SequenceRoutes(parts.catalog, parts.sequences, bounds, is_open=exposure.shows_sequences(restrictions)),
        SystemSharedMemory(regions, bounds),
        origins,
        restrictions,
    )
    return PortApplications(
        of_http,
        build_crowded_app(server, origins, restrictions),
        build_metrics_app(server, origins, settings.restrictions),
        build_crowded_app(server, origins, settings.restrictions),
    )


def repository_of(
    parts: GatewayParts, exposure: Exposure, restrictions: Mapping[str, Restriction]
) -> RepositoryControl:
    """Where models are loaded and unloaded; without overrides of configurations where everybody could send them."""
    return parts.repository if exposure.takes_overrides(restrictions) else parts.repository.without_overrides()


def gauges_of(parts: GatewayParts, http: Share, grpc: GrpcServer) -> list[Gauge]:
    """The metrics of this gateway process alone."""
    return [
        Gauge(
            "seqmesh_gateway_requests_in_flight",
            "Requests of this gateway that wait for an answer",
            lambda: parts.inference.in_flight,
        ),
        Gauge(
            "seqmesh_gateway_submitted_total",
            "Requests, and withdrawals of requests, in the round trips of seqmesh_gateway_round_trips_total",
            lambda: parts.dispatch.sent,
        ),
        Gauge(
            "seqmesh_gateway_round_trips_total",
            "Round trips in which this gateway sent requests or withdrawals, and Redis answered",
            lambda: parts.dispatch.round_trips,
        ),
        Gauge(
            "seqmesh_gateway_cpu_wait_seconds_total",
            "Time for which this gateway had something to do and no processor to do it on (Linux alone)",
            waited_s,
        ),
        Gauge(
            "seqmesh_gateway_http_connections",
            "Connections of clients to this gateway's HTTP port",
            lambda: http.taken,
        ),
        Gauge(
            "seqmesh_gateway_http_connections_refused_total",
            "Connections beyond the bounds of this gateway's HTTP port, which were answered health checks alone",
            lambda: http.refused,
        ),
        Gauge(
            "seqmesh_gateway_grpc_connections",
            "Connections of clients to this gateway's gRPC port",
            lambda: grpc.share.taken,
        ),
        Gauge(
            "seqmesh_gateway_grpc_connections_refused_total",
            "Connections beyond the bound of this gateway's gRPC port, which were closed",
            lambda: grpc.share.refused,
        ),
        Gauge(
            "seqmesh_gateway_grpc_rpcs",
            "Calls that this gateway's gRPC port serves, each stream as one",
            lambda: grpc.limit.open,
        ),
        Gauge(
            "seqmesh_gateway_grpc_rpcs_refused_total",
            "Calls beyond the bound of this gateway's gRPC port (--grpc-max-concurrent-rpcs)",
            lambda: grpc.limit.refused,
        ),
    ]
