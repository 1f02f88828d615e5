"""What holds for all connections of a port."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gateway.grpc.wire.pings import PingRules
from gateway.ports.seats import of_one_client

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
    """The open calls of a port, and their bound. refused: how many calls were beyond it, or beyond their client's"""

    most: int
    open: int = 0
    refused: int = 0
    _of_client: Counter[str] = field(default_factory=Counter[str])

    def begin(self, client: str, path: str) -> bool:
        """A call of this client has begun: whether it is within the bounds. `end` follows in any case."""
        self.open += 1
        self._of_client[client] += 1
        spare = SPARE if path in HEALTH else 0
        mine = self._of_client[client]
        is_within = self.open <= self.most + spare and mine <= of_one_client(self.most - (self.open - mine)) + spare
        self.refused += not is_within
        return is_within

    def end(self, client: str) -> None:
        self.open -= 1
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]


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
