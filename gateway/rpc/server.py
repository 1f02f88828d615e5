"""The gRPC server of a gateway: composition, limits of the transport, and a stop that loses nothing accepted.

Source: triton-spec section 6 (message size, keepalive).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from gateway.rpc.health import Health
from gateway.rpc.pb import pb_grpc
from gateway.rpc.servicer import InferenceServicer
from shared.errors import UnavailableError

INT32_MAX = (1 << 31) - 1
"""Largest message in either direction, bytes: Triton's limit, and protobuf's own."""
HEALTH_PERIOD_S = 0.25
"""How often a change of readiness is looked for, to tell those who watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits:
    """Bounds of the transport.

    receive_bytes  largest request; a larger one is refused by the transport with RESOURCE_EXHAUSTED
    keepalive_*    Triton's defaults
    """

    receive_bytes: int = INT32_MAX
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000


class GrpcServer:
    """A running server. `port` is the one it listens on, also where it was asked for 0."""

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
        """Stops: health says NOT_SERVING, nothing new is accepted, what was accepted is answered within the grace.

        grace_s  seconds until what is still unanswered is cancelled; open streams end as soon as they are answered
        """
        self._health_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._health_task
        self._health.stop()
        self._servicer.stop()
        await self._server.stop(grace_s)


async def serve_grpc(
    servicer: InferenceServicer, *, host: str, port: int, limits: GrpcLimits | None = None
) -> GrpcServer:
    """Starts serving the v2 protocol and `grpc.health.v1` on an address.

    port    0 picks a free one
    raises  UnavailableError when the address cannot be had
    """
    server = grpc.aio.server(options=channel_options(limits or GrpcLimits()))
    health = Health(servicer.is_ready)
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    health_grpc: Any = health_pb2_grpc
    health_grpc.add_HealthServicer_to_server(health, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UnavailableError(f"gRPC cannot listen on {address}: {error}") from error
    await server.start()
    return GrpcServer(server, servicer, health, bound)


def channel_options(limits: GrpcLimits) -> list[tuple[str, int]]:
    """The transport's arguments. Two servers on one port would share connections silently, so that is refused."""
    return [
        ("grpc.max_receive_message_length", min(limits.receive_bytes, INT32_MAX)),
        ("grpc.max_send_message_length", INT32_MAX),
        ("grpc.keepalive_time_ms", limits.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
        ("grpc.so_reuseport", 0),
    ]
