"""How a gateway's open files are shared out: each connection of a client takes one, and so does everything else.

Source: getrlimit(2), RLIMIT_NOFILE.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

OWN = 64
"""Kept for the gateway itself: Redis, listening sockets, event loops, logs."""
METRICS = 16
"""Connections of the metrics port."""
SPARE = 16
"""Connections of the HTTP port beyond its bound, for health and refusals."""
CONNECTIONS_MAX = 4096
"""Of each protocol, unless it is told otherwise."""
LIMIT_WANTED = OWN + METRICS + SPARE + 2 * CONNECTIONS_MAX


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Connections at once. http_per_client: of one client, of these; grpc: what its transport takes at most."""

    http: int
    http_per_client: int
    grpc: int
    metrics: int = METRICS
    spare: int = SPARE
    spare_per_client: int = SPARE // 2


def raise_limit() -> int:
    """Asks the system for as many open files as are wanted; returns how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_WANTED if hard == resource.RLIM_INFINITY else min(LIMIT_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return LIMIT_WANTED if soft == resource.RLIM_INFINITY else soft


def shares(limit: int, *, http: int = 0, http_per_client: int = 0, grpc: int = 0) -> DescriptorShares:
    """What each port may have of so many open files. The others as they were set; 0 for the default."""
    half = min(CONNECTIONS_MAX, max(1, (limit - OWN - METRICS - SPARE) // 2))
    connections = http or half
    return DescriptorShares(connections, http_per_client or max(1, connections // 2), grpc or half)
