"""A Redis Cluster: which of its nodes holds which keys.

To a mesh a Cluster is several servers, one for each hash tag (`shared.store.connections.homes`). A home finds its node
as one finds a primary by way of Sentinels. After a failover, or when the tag's slot was moved, the node refuses the
next command; then the home finds its new node. While a slot moves, its home waits.
"""

from __future__ import annotations

import random
from binascii import crc_hqx
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from shared.contract.ids import ShardId
from shared.store.connections.discovery import Discovery, NoAnswerError, Primary
from shared.store.connections.homes import MESH_TAG
from shared.store.reading import text_of

SLOTS = 1 << 14
ASKED_MAX = 5
"""Nodes that are asked for the home of a tag, drawn anew each time from the URL's and those that were heard of: if
there are more, those of the URL may all be gone.
"""
NAMELESS = "?"
"""The host of a node that has no name, where nodes tell names (cluster-preferred-endpoint-type hostname)."""
NUMBERS = 4096
"""From so many numbers those of a Cluster's shards are chosen: enough for each node of a large Cluster to have some."""

Node = tuple[str, int]
"""Its host and port."""


def slot_of(tag: str) -> int:
    """The slot of the keys with this tag. Source: Redis Cluster's specification, "Keys distribution model": CRC16 in
    its XMODEM variant.
    """
    return crc_hqx(tag.encode(), 0) % SLOTS


class Nodes:
    """The nodes that are known. connect: makes a connection to one of them, not yet connected"""

    def __init__(self, named: Sequence[Node], connect: Callable[[Node], Any]) -> None:
        self._named = tuple(named)
        self._connect = connect
        self._heard_of: tuple[Node, ...] = ()

    def holder(self, tag: str) -> Discovery:
        """Tells the node that holds a tag's keys."""
        return Discovery(
            f"no node of the Redis Cluster tells who holds the keys of {{{tag}}}",
            lambda: map(self._connect, self._asked()),
            ("CLUSTER", "SLOTS"),
            lambda reply, connection: self._holder(slot_of(tag), reply, connection),
        )

    async def with_slots(self) -> tuple[Node, ...]:
        """Those that hold slots. Raises redis-py's ConnectionError if none of those that are asked tells."""
        await self.holder(MESH_TAG).primary()
        return self._heard_of

    def _asked(self) -> tuple[Node, ...]:
        known = tuple(dict.fromkeys(self._named + self._heard_of))
        return known if len(known) <= ASKED_MAX else tuple(random.sample(known, ASKED_MAX))

    def _holder(self, slot: int, reply: Any, connection: Any) -> Primary:
        """The holder by a node's reply to CLUSTER SLOTS. Raises NoAnswerError."""
        try:
            ranges = [(first, last, _node(holder, connection.host)) for first, last, holder, *_ in reply]
            holders = [node for first, last, node in ranges if first <= slot <= last]
        except (AttributeError, IndexError, TypeError, ValueError) as nonsense:
            raise NoAnswerError("its answer is not a Cluster node's") from nonsense
        if not holders:
            raise NoAnswerError(f"it knows of no node with slot {slot}")
        self._heard_of = tuple(dict.fromkeys(node for _, _, node in ranges))
        return Primary(*holders[0], epoch=0)


def _node(told: Sequence[Any], asked: str) -> Node:
    """A node of a reply. asked: the host that was asked: that of a node without a host. One that should tell its name
    but has none is known by its address.
    """
    host, port = text_of(told[0] or b""), int(told[1])
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}")
    if host == NAMELESS:
        host = text_of(told[3][told[3].index(b"ip") + 1])
    return host or asked, port


def shards_on(told: Sequence[Any], count: int = 0) -> tuple[ShardId, ...]:
    """Shards whose keys lie on all nodes, as evenly as can be.

    told   a reply to CLUSTER SLOTS
    count  how many; 0: one for each node with slots
    """
    # By their ids: of some nodes no host is told.
    ranges = sorted((last, holder[2]) for _, last, holder, *_ in told)
    held: dict[Any, deque[ShardId]] = {node: deque() for _, node in ranges}
    for number in range(NUMBERS):
        if node := next((node for last, node in ranges if last >= slot_of(str(number))), None):
            held[node].append(ShardId(number))
    in_turn = (queue.popleft() for _ in range(NUMBERS) for queue in held.values() if queue)
    return tuple(sorted(islice(in_turn, count or len(held))))
