"""What holds for all connections of a port."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.grpc.wire.pings import PingRules


@dataclass(slots=True)
class RpcLimit:
    """The open calls of a port, and their bound."""

    most: int
    open: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """Settings of the connections of a port.

    message_bytes_max  largest message as it comes
    idle_s             how long a connection without a call stays open
    age_s, grace_s     age at which a connection is to end, and how long its calls may take then; 0: any
    """

    pings: PingRules
    message_bytes_max: int
    idle_s: float
    age_s: float = 0.0
    grace_s: float = 0.0
