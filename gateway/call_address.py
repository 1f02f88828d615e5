"""Where executors reach a gateway's gRPC port, for models that call other models."""

from __future__ import annotations

import socket

from gateway.settings import GatewaySettings
from shared.process.addresses import authority
from shared.store.connections.redis_url import parse_redis_url

EVERY_INTERFACE = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not listened on
NONE = "none"


def call_address(settings: GatewaySettings, port: int) -> str:
    """The address as `shared.store.company.ServiceLine.grpc` has it; "" if this gateway takes no calls.

    port  that the gRPC port listens on
    """
    if settings.grpc_advertise == NONE:
        return ""
    scheme = "grpcs" if settings.grpc_tls else "grpc"
    if settings.grpc_advertise:
        return f"{scheme}://{settings.grpc_advertise}"
    host = address_towards(settings.redis_url) if settings.host in EVERY_INTERFACE else settings.host
    return f"{scheme}://{authority(host, port)}"


def address_towards(redis_url: str) -> str:
    """This machine's address in the network in which Redis is; the loopback address where Redis has a socket file."""
    named = parse_redis_url(redis_url).named
    if named is None:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(*named, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only asks the system which way it would go.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
