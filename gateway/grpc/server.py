"""The gRPC server of a gateway: what it serves, the rules of its connections, and a stop that loses nothing accepted.

Source: triton-spec section 6 (message size, keepalive); Triton's command line.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from grpc_health.v1 import health_pb2

from gateway.bounds.clients import PATIENCE_S
from gateway.bounds.descriptors import CONNECTIONS_MAX, LEAVING
from gateway.bounds.memory import largest
from gateway.grpc.health import Health
from gateway.grpc.pb import pb
from gateway.grpc.rpcs import Rpcs
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.wire.connection import GrpcConnection
from gateway.grpc.wire.pings import PingRules
from gateway.grpc.wire.rules import ConnectionRules, RpcLimit
from gateway.ports.listening import GRPC_PORT, listen
from gateway.ports.seats import Seat, Share, of_one_client
from gateway.ports.serving import PortServer
from gateway.ports.tls import tls_context
from gateway.settings import GatewaySettings
from shared.contract.errors import UnavailableError
from shared.process import logs

FIRST_S = 20.0
"""How long a new connection may take for TLS and for the preface of HTTP/2."""
IDLE_S = 600.0
"""How long a connection without a call stays open, as on the HTTP port. Clients silently open another one."""
HEALTH_PERIOD_S = 0.25
"""Pause between two checks for a change of readiness, which watchers are told."""


class GrpcServer(PortServer[GrpcConnection]):
    """Serves calls on one port. share: the seats of its connections; limit: of its calls"""

    def __init__(
        self,
        rpcs: Rpcs,
        servicer: InferenceServicer,
        health: Health,
        settings: GatewaySettings,
        connections_max: int,
    ) -> None:
        """settings: with their bounds filled in (`GatewaySettings.bounded`). Raises as `tls_context`."""
        self.share = Share(connections_max, of_one_client(connections_max))
        super().__init__(
            "grpc", [self.share], grpc_tls(settings), first_s=FIRST_S, end_s=PATIENCE_S, leaving_max=LEAVING
        )
        self._rpcs = rpcs
        self._servicer = servicer
        self._health = health
        self._rules = connection_rules(settings)
        self.limit = RpcLimit(settings.grpc_max_concurrent_rpcs)
        self._loops.append(asyncio.get_running_loop().create_task(self._watch_health(), name="grpc health"))

    async def stop(self, grace_s: float, *, see_off_s: float | None = None) -> None:
        """Answers the calls on open connections, closes the connections, then stops.

        Health says NOT_SERVING, and no connection is accepted any more. Calls on open connections are served until
        their clients have had time to hear of it. A connection ends with its last call, a stream as soon as all its
        requests are answered.

        grace_s    seconds until unanswered calls are cancelled
        see_off_s  seconds until connections take no new call; None: SEE_OFF_S
        """
        self._health.stop()
        self._servicer.leave()
        await super().stop(grace_s, see_off_s=see_off_s)

    def relieve(self, excess: int) -> int:
        """Gives memory of what is on its way back: ends the calls that keep most of messages, however many connections
        they are spread over, then the connections that keep most of headers. Returns how many bytes that is."""
        kept = {rpc: rpc.messages.kept_bytes for one in self._connections() for rpc in one.rpcs.values()}
        calls = largest(kept, excess)
        given = sum([rpc.give_up() for rpc in calls])
        if calls:
            logs.warning("memory is short, calls are ended", calls=len(calls), waiting_bytes=given)
        unfinished = {connection: connection.unfinished_bytes for connection in self._connections()}
        connections = largest(unfinished, excess - given)
        for connection in connections:
            connection.cut()
        headers = sum([unfinished[connection] for connection in connections])
        if connections:
            logs.warning("memory is short, connections are closed", connections=len(connections), waiting_bytes=headers)
        return given + headers

    def _connection(self, seat: Seat) -> GrpcConnection:
        return GrpcConnection(self._rpcs.serve, seat, self._rules, self.limit, self._turns)

    def _leave(self) -> None:
        for connection in self._connections():
            connection.leave()

    async def _close(self) -> None:
        self._servicer.stop()

    async def _watch_health(self) -> None:
        while True:
            self._health.refresh()
            await asyncio.sleep(HEALTH_PERIOD_S)


async def serve_grpc(
    servicer: InferenceServicer, settings: GatewaySettings, *, connections_max: int = CONNECTIONS_MAX
) -> GrpcServer:
    """Starts serving the v2 protocol and `grpc.health.v1` on the address of the settings.

    settings         with their bounds filled in (`GatewaySettings.bounded`)
    connections_max  clients' connections at once
    raises           UnavailableError when the address cannot be had, or a file of TLS cannot be read
    """
    health = Health(servicer.is_ready)
    rpcs = Rpcs(servicer.intake, servicer.unread, settings.grpc_restrictions)
    rpcs.add(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"], servicer)
    messages: Any = health_pb2
    rpcs.add(messages.DESCRIPTOR.services_by_name["Health"], health)
    listening = listen(settings.host, settings.grpc_port, of=GRPC_PORT, is_shared=settings.reuse_port)
    try:
        server = GrpcServer(rpcs, servicer, health, settings, connections_max)
    except UnavailableError:
        listening.close()
        raise
    await server.start(listening)
    return server


def connection_rules(settings: GatewaySettings) -> ConnectionRules:
    pings = PingRules(
        time_s=settings.grpc_keepalive_time / 1000,
        timeout_s=settings.grpc_keepalive_timeout / 1000,
        without_rpcs=settings.grpc_keepalive_permit_without_calls,
        without_data=settings.grpc_http2_max_pings_without_data,
        client_pause_s=settings.grpc_http2_min_recv_ping_interval_without_data / 1000,
        strikes_max=settings.grpc_http2_max_ping_strikes,
    )
    return ConnectionRules(
        pings,
        message_bytes_max=settings.grpc_max_input_size,
        idle_s=IDLE_S,
        age_s=settings.grpc_max_connection_age / 1000,
        grace_s=settings.grpc_max_connection_age_grace / 1000,
    )


def grpc_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """The port's TLS; None: plain text. Raises as `tls_context`."""
    if not settings.grpc_tls:
        return None
    cert, key, ca = settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert
    return tls_context(GRPC_PORT, cert, key, ca, protocol="h2", asks_clients=settings.grpc_use_ssl_mutual)
