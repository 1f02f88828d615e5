"""Spare slots: free slots that the leader lays out in Redis, where `submit` gives them to sequences.

So one that begins, or returns from being paged, does not wait for the leader, and needs none. One that is over, or
paged by its owner, gives its slot back to the spare ones (`spare_again` in common.lua). The leader reads in the feed
which sequences took which slots.

What the leader knows lags behind, so it gives no slot to others that may be spare. When sequences wait, and only spare
slots are left for them, it recalls those. The recall has an entry of its own in the feed. All slots that were taken
before are named before it. So the slots that are still spare when the leader reads it are free.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.actions import Action, LayOut, Recall
from scheduler.core.events import RecallSent, SparesRecalled
from scheduler.core.placement import Ring
from scheduler.core.slots import SlotTable
from scheduler.core.state import NO_EPOCH, Executor, LeaderState
from shared.contract.ids import ExecutorId, ShardId, shard_of


def lay_out(state: LeaderState, versions: Iterable[str], cause: str) -> list[Action]:
    """Lays out slots where few are left, of versions for which nobody waits. Recalls them where too many are spare for
    an even load."""
    actions: list[Action] = []
    for version in sorted(versions):
        if not len(state.backlogs[version]):
            ring = state.ring(version)
            most = room(ring)
            for executor, table in sorted(ring.tables.items()):
                actions += level(state, table, most[executor], cause)
    return actions


def has_spares_only(state: LeaderState) -> bool:
    """Whether sequences find spare slots, and nobody waits for a slot or is underway to one."""
    return (
        any(executor.spare_in for executor in state.executors.values())
        and not any(executor.recalls for executor in state.executors.values())
        and not any(len(backlog) for backlog in state.backlogs.values())
        and not (state.underway or state.wishes)
    )


def room(ring: Ring) -> dict[ExecutorId, int]:
    """How many further sequences may come to each executor: no more than keep it within its share."""
    loads = ring.loads()
    share = ring.share(sum(loads.values()) + 1) if len(loads) > 1 else None
    return {
        executor: max(0, min(table.size, table.size if share is None else share) - table.load)
        if executor in loads
        else 0
        for executor, table in ring.tables.items()
    }


def level(state: LeaderState, table: SlotTable, most: int, cause: str) -> list[Action]:
    """Lays out slots of a table in each shard that has less than half of what it should have, or less than all of it
    while a low slot is left behind. most: for all shards"""
    actions: list[Action] = []
    executor, shards = state.executors[table.executor], state.shards
    if executor.recalls:
        return []
    spare = {shard: table.spares_in(shard) for shard in shards}
    if sum(spare.values()) > 2 * (most + len(shards)):
        return recall(state, executor, cause)
    each = -(-min(state.policy.spare_slots, most) // len(shards))
    for shard, left in spare.items():
        is_due = 2 * left < each or (left < each and table.has_gap)
        if is_due and (slots := table.lay_out(each - left, shard)):
            executor.spare_in.add(shard)
            actions.append(LayOut(table.executor, table.served.version, shard, tuple(slots), cause))
    return actions


def recall(state: LeaderState, executor: Executor, cause: str) -> list[Action]:
    """Recalls an executor's spare slots, unless that was done already."""
    if not executor.spare_in or executor.recalls:
        return []
    executor.recalls = dict.fromkeys(state.shards, NO_EPOCH)
    return [Recall(executor.executor, cause)]


def recall_sent(state: LeaderState, event: RecallSent) -> list[Action]:
    """A recall was carried out in a shard. Its entry in the feed is still to be read."""
    executor = state.executors.get(event.executor)
    if executor is not None and event.shard in executor.recalls:
        executor.recalls[event.shard] = event.number
    return []


def recalled(state: LeaderState, event: SparesRecalled) -> Executor | None:
    """A recall was read of in the feed: what is still spare in that shard is free. Returns the executor; None if it was
    another recall."""
    executor = state.executors.get(event.executor)
    if executor is None or not event.number or executor.recalls.get(event.shard) != event.number:
        return None
    for table in state.tables(event.executor):
        table.recall(event.shard)
        state.recalled.add(table.served.version)
    forget_superseded(state, event.executor, event.shard)
    del executor.recalls[event.shard]
    executor.spare_in.discard(event.shard)
    return executor


def forget_superseded(state: LeaderState, executor: ExecutorId, *shards: ShardId) -> None:
    """Nothing comes of ends any more that the feed is still to tell of, or has told before: the slots in these shards
    are no spare ones now. No shards: in any.
    """
    for held, place in list(state.superseded.items()):
        if place.executor == executor and (not shards or shard_of(held[0], state.policy.shards) in shards):
            del state.superseded[held]
