"""What holds for all connections of a port."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.bounds.client_shares import ClientShares
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
    """The open calls of a port, and their bound. refused: how many calls were beyond it, or beyond their client's"""

    most: int
    refused: int = 0
    _shares: ClientShares = field(default_factory=ClientShares)

    @property
    def open(self) -> int:
        return self._shares.taken

    def begin(self, client: str, path: str) -> bool:
        """A call of this client has begun: whether it is within the bounds. `end` follows in any case."""
        self._shares.take(client, 1)
        spare = SPARE if path in HEALTH else 0
        share = self._shares.most(client, self.most, is_small=False)
        is_within = self.open <= self.most + spare and self._shares.of(client) <= share + spare
        self.refused += not is_within
        return is_within

    def end(self, client: str) -> None:
        self._shares.take(client, -1)


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
