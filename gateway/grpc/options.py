"""Converts a gateway's settings to the options of its gRPC server."""

from __future__ import annotations

from gateway.grpc.server import GrpcOptions, GrpcTls, Keepalive
from gateway.settings import GatewaySettings


def grpc_options(settings: GatewaySettings, connections_max: int | None = None) -> GrpcOptions:
    """The options that the settings mean. The settings were checked when they were read.

    connections_max  bound of the port's connections (`gateway.bounds.descriptors`)
    """
    return GrpcOptions(
        receive_bytes=settings.grpc_max_input_size,
        rpcs_max=settings.grpc_max_concurrent_rpcs,
        connections_max=connections_max,
        keepalive=Keepalive(
            time=settings.grpc_keepalive_time,
            timeout=settings.grpc_keepalive_timeout,
            permit_without_calls=settings.grpc_keepalive_permit_without_calls,
            pings_without_data_max=settings.grpc_http2_max_pings_without_data,
            ping_interval_min=settings.grpc_http2_min_recv_ping_interval_without_data,
            ping_strikes_max=settings.grpc_http2_max_ping_strikes,
            connection_age_max=settings.grpc_max_connection_age,
            connection_age_grace=settings.grpc_max_connection_age_grace,
        ),
        tls=_tls(settings),
        restrictions=settings.grpc_restrictions,
    )


def _tls(settings: GatewaySettings) -> GrpcTls | None:
    if not settings.grpc_tls:
        return None
    return GrpcTls(
        certificate=settings.grpc_server_cert,
        key=settings.grpc_server_key,
        root=settings.grpc_root_cert,
        mutual=settings.grpc_use_ssl_mutual,
    )
