"""Consistent hashing: maps keys to nodes so that few keys move when nodes come and go. Pure.

Each node has many points on a ring of 64-bit hashes. A key belongs to the node of the first point at or after the key's
own hash. With *bounded loads*, a node that already holds its share is passed over, and the next node on the ring takes
the key. So no node holds more than a constant times the mean.

The hash is xxhash64 with seed 0: the same in every process, on every machine and in every release. Python's own
`hash()` is salted per process and must never be used for placement.

source  Karger et al., "Consistent Hashing and Random Trees" (1997); Mirrokni, Thorup, Zadimoghaddam, "Consistent
        Hashing with Bounded Loads" (2016)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache

import xxhash


def stable_hash(text: str) -> int:
    """A 64-bit hash of a text: the same in every process, machine and release."""
    return xxhash.xxh64_intdigest(text.encode())


def bounded_capacity(load_total: int, nodes: int, factor: float) -> int:
    """The most keys that one of `nodes` may hold when all together hold `load_total`: `factor` times the mean.

    It is at least the mean rounded up, so that few keys still find a node.

    factor  how far above the mean a node may go, at least 1
    """
    assert nodes > 0
    return max(math.ceil(load_total / nodes), math.floor(factor * load_total / nodes))


VIRTUAL_NODES = 64
"""Points of each node: more is more even, and costs memory and time when a node joins."""
RINGS_KEPT = 16
"""Of the nodes for which a ring was asked last: hundreds of models have the same executors, and these change for all
models at once. A ring of 200 nodes takes 1.5 MB.
"""


class HashRing:
    """Nodes on a ring. Two rings of the same nodes are the same ring, in whatever order the nodes came."""

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> None:
        assert virtual_nodes > 0
        self._nodes = frozenset(nodes)
        # Sorted by hash, then by name. So every process resolves a collision of two nodes' points in the same way.
        self._points = sorted(
            (stable_hash(f"{node}#{index}"), node) for node in self._nodes for index in range(virtual_nodes)
        )

    def walk(self, key: str) -> Iterator[str]:
        """Every node once, from the key's own node onwards round the ring."""
        offered: set[str] = set()
        start = bisect_left(self._points, (stable_hash(key), ""))
        for index in range(len(self._points)):
            node = self._points[(start + index) % len(self._points)][1]
            if node not in offered:
                offered.add(node)
                yield node
                if len(offered) == len(self._nodes):
                    return


@lru_cache(RINGS_KEPT)
def ring_of(nodes: frozenset[str], virtual_nodes: int = VIRTUAL_NODES) -> HashRing:
    """The ring of these nodes, which all who ask for it share."""
    return HashRing(nodes, virtual_nodes)
