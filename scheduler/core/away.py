"""Shards that are away: a leader goes on without them.

While the node of a Cluster that holds a shard cannot be reached, nobody can read which slots the shard's sequences
hold, or do anything about them. But every leader has noted which slots it lent to which shard (`scheduler.lent_slots`):
those of the lost shard are withheld, so that nobody else gets them. Of all other shards the leader leads as ever. When
the node is back, another leader begins, with all shards.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core.slots import SlotAddress
from scheduler.core.state import LeaderState
from shared.contract.ids import ExecutorId, ShardId

Lent = Mapping[ShardId, frozenset[SlotAddress]]
"""By shard: the slots that its sequences hold, or may hold."""


def furnish(state: LeaderState, executor: ExecutorId) -> None:
    """Withholds slots of an executor whose slot tables were made."""
    for place in (place for places in state.withheld.values() for place in places if place.executor == executor):
        table = state.ring(place.version).tables.get(executor)
        if table is not None:
            table.withhold(place)
