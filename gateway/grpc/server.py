"""The gRPC server of a gateway: composition, the transport's options, and a stop that loses nothing accepted.

Source: triton-spec section 6 (message size, keepalive); Triton's command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from gateway.bounds.descriptors import CONNECTIONS_MAX
from gateway.grpc.health import Health
from gateway.grpc.methods import add_service
from gateway.grpc.pb import pb
from gateway.grpc.restricted import Restrictions
from gateway.grpc.servicer import InferenceServicer
from gateway.settings import INT32_MAX, GatewaySettings
from shared.contract.errors import UnavailableError
from shared.process import logs

WINDOW_BYTES = 256 << 10
"""How much of a stream the transport receives before it is read. With 64 KiB, requests of that size take 1.5 times as
long."""
HANDSHAKE_MS = 20_000
"""How long a new connection may take for TLS and for the preface of HTTP/2."""
IDLE_MS = 600_000
"""How long a connection without a call stays open, as on the HTTP port. Clients silently open another one."""
TRANSPORT_LOGGER = "grpc._cython.cygrpc"
ABOUT_CLIENTS = ("ExecuteBatchError raised in core", "Invalid encoding on")
HEALTH_PERIOD_S = 0.25
"""Pause between two checks for a change of readiness, which watchers are told."""
SERVE_ON_S = 2.0
"""How long a server that stops takes new calls, on connections that are never without a call."""


class GrpcServer:
    """A running server. port: the port that it listens on, which the system chose where 0 was asked for."""

    def __init__(self, server: Any, servicer: InferenceServicer, health: Health, port: int) -> None:
        self.port = port
        self._server = server
        self._servicer = servicer
        self._health = health
        self._health_task = asyncio.get_running_loop().create_task(self._watch_health(), name="grpc health")

    async def _watch_health(self) -> None:
        while True:
            self._health.refresh()
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def stop(self, grace_s: float) -> None:
        """Answers the calls on open connections, closes the connections, then stops.

        Health says NOT_SERVING, and no connection is accepted any more. Calls on open connections are served. A
        connection is closed as soon as it has no call; a stream ends as soon as all its requests are answered. If calls
        on a connection overlap without end, new ones are refused with UNAVAILABLE after SERVE_ON_S. Where the system
        does not show the sockets, grpc.aio's own stop is used, which cancels calls that arrive while it works.

        grace_s  seconds until unanswered calls are cancelled
        """
        self._health_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._health_task
        self._health.stop()
        self._servicer.leave()
        refusal = asyncio.get_running_loop().call_later(SERVE_ON_S, self._servicer.stop)
        left_s = 0.0
        try:
            async with asyncio.timeout(grace_s):
                await self._servicer.connections.leave()
        except TimeoutError:
            self._servicer.stop()
        except OSError as error:
            logs.warning("grpc sockets not found", error=str(error))
            self._servicer.stop()
            left_s = grace_s
        finally:
            refusal.cancel()
        await self._server.stop(left_s)


async def serve_grpc(
    servicer: InferenceServicer, settings: GatewaySettings, *, connections_max: int = CONNECTIONS_MAX
) -> GrpcServer:
    """Starts serving the v2 protocol and `grpc.health.v1` on the address of the settings.

    settings         with their bounds filled in (`GatewaySettings.bounded`)
    connections_max  clients' connections at once; the transport closes further ones
    raises           UnavailableError when the address cannot be had, or a file of TLS cannot be read
    """
    logging.getLogger(TRANSPORT_LOGGER).addFilter(is_about_the_gateway)
    restrictions = settings.grpc_restrictions
    server = grpc.aio.server(
        options=channel_options(settings, connections_max),
        interceptors=[Restrictions(restrictions)] if restrictions else [],
        maximum_concurrent_rpcs=settings.grpc_max_concurrent_rpcs,
    )
    health = Health(servicer.is_ready)
    services: dict[Any, Any] = {
        pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]: servicer,
        health_pb2.DESCRIPTOR.services_by_name["Health"]: health,
    }
    for service, methods in services.items():
        add_service(server, service, methods, servicer.intake, servicer.connections)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.grpc_tls:
            bound = server.add_secure_port(address, credentials(settings))
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise UnavailableError(f"gRPC cannot listen on {address}: {error} (--grpc-port names another port)") from error
    servicer.connections.port = bound
    servicer.connections.encrypted = settings.grpc_tls
    await server.start()
    return GrpcServer(server, servicer, health, bound)


def is_about_the_gateway(record: logging.LogRecord) -> bool:
    """Filters the transport's log: False for two messages that are about clients, not about the gateway.

    The transport logs a traceback when a client leaves before its call has ended, though the handler learns of it too.
    And it logs each header that is not UTF-8, though it can read it.
    """
    return not any(words in str(record.msg) for words in ABOUT_CLIENTS)


def credentials(settings: GatewaySettings) -> grpc.ServerCredentials:
    """The port's TLS credentials. Raises OSError for a file that cannot be read."""
    pair = (Path(settings.grpc_server_key).read_bytes(), Path(settings.grpc_server_cert).read_bytes())
    root = Path(settings.grpc_root_cert).read_bytes() if settings.grpc_root_cert else None
    return grpc.ssl_server_credentials([pair], root, require_client_auth=settings.grpc_use_ssl_mutual)


def channel_options(settings: GatewaySettings, connections_max: int) -> list[tuple[str, int]]:
    arguments = [
        # INT32_MAX is the largest message in either direction: Triton's limit, and protobuf's own.
        ("grpc.max_receive_message_length", min(settings.grpc_max_input_size, INT32_MAX)),
        ("grpc.max_send_message_length", INT32_MAX),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.keepalive_time_ms", settings.grpc_keepalive_time),
        ("grpc.keepalive_timeout_ms", settings.grpc_keepalive_timeout),
        ("grpc.keepalive_permit_without_calls", int(settings.grpc_keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", settings.grpc_http2_max_pings_without_data),
        (
            "grpc.http2.min_recv_ping_interval_without_data_ms",
            settings.grpc_http2_min_recv_ping_interval_without_data,
        ),
        ("grpc.http2.max_ping_strikes", settings.grpc_http2_max_ping_strikes),
        # Without --reuse-port a second server on the same port would silently get a part of the connections.
        ("grpc.so_reuseport", int(settings.reuse_port)),
        # `gateway.grpc.intake` unpacks compressed messages, and counts their bytes.
        ("grpc.per_message_decompression", 0),
        # A fixed window for each stream. The transport's own estimate grows without regard to the number of streams:
        # 100 streams that were not read took 774 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
    ]
    if settings.grpc_max_connection_age:
        arguments.append(("grpc.max_connection_age_ms", settings.grpc_max_connection_age))
    if settings.grpc_max_connection_age_grace:
        arguments.append(("grpc.max_connection_age_grace_ms", settings.grpc_max_connection_age_grace))
    return arguments
