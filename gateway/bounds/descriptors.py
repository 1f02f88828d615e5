"""Divides the files that a gateway may open among its ports: each connection of a client takes one."""

from __future__ import annotations

from dataclasses import dataclass

OWN = 64
"""Files kept for the gateway itself: Redis, listening sockets, event loops, logs."""
METRICS = 16
"""Connections of the metrics port."""
SPARE, METRICS_SPARE = 16, 4
"""Connections of the HTTP port, and of the metrics port, beyond its bound. They are served health alone, and refused
everything else."""
LEAVING = 8
"""Connections of each port that have made room for others and may take their time to close."""
PORTS = 3
CONNECTIONS_MAX = 4096
"""Default bound of the connections of each protocol."""


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Connections that each port may have at once. http_per_client: of `http`, those of one client."""

    http: int
    http_per_client: int
    grpc: int


def shares(limit: int, *, http: int = 0, http_per_client: int = 0, grpc: int = 0, regions: int = 0) -> DescriptorShares:
    """The connections of each port, for a limit of open files.

    regions           files kept for regions of shared memory
    http, grpc, ...   settings, where 0 is the default
    """
    kept = OWN + METRICS + SPARE + METRICS_SPARE + PORTS * LEAVING + regions
    half = min(CONNECTIONS_MAX, max(1, (limit - kept) // 2))
    connections = http or half
    return DescriptorShares(connections, http_per_client or max(1, connections // 2), grpc or half)
