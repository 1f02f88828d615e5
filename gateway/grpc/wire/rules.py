"""What holds for all connections of a port."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.grpc.wire.pings import PingRules

HEALTH = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
SPARE = 16
"""Calls beyond the bound: of health alone, so that nobody takes a gateway for dead because a client has many calls."""


@dataclass(slots=True)
class RpcLimit:
    """The open calls of a port, and their bound. refused: how many calls were beyond it"""

    most: int
    open: int = 0
    refused: int = 0

    def begin(self, path: str) -> bool:
        """A call has begun: whether it is within the bound."""
        self.open += 1
        is_within = self.open <= self.most + (SPARE if path in HEALTH else 0)
        self.refused += not is_within
        return is_within


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
