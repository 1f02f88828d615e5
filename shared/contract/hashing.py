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
from bisect import bisect_left, insort
from collections.abc import Iterator

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


class HashRing:
    """Nodes on a ring. Two rings of the same nodes are the same ring, in whatever order the nodes came."""

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        assert virtual_nodes > 0
        self._virtual_nodes = virtual_nodes
        # Sorted by hash, then by name. So every process resolves a collision of two nodes' points in the same way.
        self._points: list[tuple[int, str]] = []
        self._nodes: set[str] = set()

    def add(self, node: str) -> None:
        """Puts a node on the ring. Does nothing when it is there already."""
        if node in self._nodes:
            return
        self._nodes.add(node)
        for index in range(self._virtual_nodes):
            insort(self._points, (stable_hash(f"{node}#{index}"), node))

    def remove(self, node: str) -> None:
        """Takes a node off the ring. Does nothing when it is not there."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._points = [point for point in self._points if point[1] != node]

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
