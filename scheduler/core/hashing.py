"""Consistent hashing: which of the nodes a key belongs to, so that few keys move when nodes come and go. Pure.

Each node has many points on a ring of 64-bit hashes; a key belongs to the first point at or after its own. With
*bounded loads* a node that holds more than its share is passed over and the next one on the ring takes the key, so
that no node holds more than a constant times the mean.

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
    """64 bits of a text, the same everywhere and for ever."""
    return xxhash.xxh64_intdigest(text.encode())


def bounded_capacity(load_total: int, nodes: int, factor: float) -> int:
    """The most keys that one of `nodes` may hold when all of them together hold so many: not more than `factor` times
    the mean, but for few keys, where it is the mean rounded up.

    factor  how far above the mean a node may go, at least 1
    """
    assert nodes > 0
    return max(math.ceil(load_total / nodes), math.floor(factor * load_total / nodes))


class HashRing:
    """Nodes on a ring. Two rings of the same nodes are the same ring, in whatever order the nodes came.

    virtual_nodes  points of each node: more is more even, and costs memory and time when a node joins
    """

    def __init__(self, virtual_nodes: int = 64) -> None:
        assert virtual_nodes > 0
        self._virtual_nodes = virtual_nodes
        # Sorted by hash, then by name: a collision of two nodes' points is resolved alike in every process.
        self._points: list[tuple[int, str]] = []
        self._nodes: set[str] = set()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    def nodes(self) -> list[str]:
        """Every node, by name."""
        return sorted(self._nodes)

    def add(self, node: str) -> None:
        """Puts a node on the ring; nothing happens when it is there."""
        if node in self._nodes:
            return
        self._nodes.add(node)
        for point in self._points_of(node):
            insort(self._points, point)

    def remove(self, node: str) -> None:
        """Takes a node off the ring; nothing happens when it is not there."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._points = [point for point in self._points if point[1] != node]

    def walk(self, key: str) -> Iterator[str]:
        """Every node once, in the order in which the ring offers them to the key."""
        offered: set[str] = set()
        start = bisect_left(self._points, (stable_hash(key), ""))
        for index in range(len(self._points)):
            node = self._points[(start + index) % len(self._points)][1]
            if node not in offered:
                offered.add(node)
                yield node
                if len(offered) == len(self._nodes):
                    return

    def _points_of(self, node: str) -> list[tuple[int, str]]:
        return [(stable_hash(f"{node}#{index}"), node) for index in range(self._virtual_nodes)]
