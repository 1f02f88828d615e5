"""Rebuilds a leader's state from Redis, when it begins to lead and after it has lost the connection.

1. The fence is raised. From then on no other scheduler changes anything of the model. Clients and executors do, but
   what they change comes through the streams. Spare slots are recalled.
2. The newest epochs are read, then the live sequences, from the executors' owned sets and the sequences' records.
3. The backlog is not read here: it is the starts stream itself. The leader reads it from its beginning, and so the
   feed. Feed entries that are older than the rebuilt state carry epochs that it does not know, and change nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from redis.exceptions import ResponseError

from scheduler.core.events import ContendersFound, EpochsFound, Event, SequenceFound, Tick
from scheduler.core.slots import SlotAddress
from scheduler.ingest import Offers, address, member_events
from scheduler.mesh import MeshAccess
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, Term
from shared.contract.record import EPOCH, INSTANCE, LIVE, OWNER, SLOT, STATE, TENANT, VERSION
from shared.store.reading import text_of, value_of
from shared.store.script_values import LedShard

RECORDS_PER_READ = 512
"""Sequence records that are read in one round trip."""
COUNTED_MAX = 10**14
"""A counter that has come so far is one that cannot be read (common.lua)."""
FIELDS_READ = (STATE, OWNER, VERSION, INSTANCE, SLOT, EPOCH, TENANT)
"""Fields that are read of each record."""


async def check_new(mesh: MeshAccess, model: str, term: Term, shards: Sequence[ShardId]) -> None:
    """Raises ResponseError FENCED if a term that was just given has been seen in one of these shards.

    The node of a Cluster that counts the terms has come back without its newest ones then. Their leader may be frozen,
    and what it sends when it wakes would be as new to the shards as what the leader of today sends.
    """
    fences = [mesh.keys.fence(shard, model) for shard in shards]
    found = await mesh.links.ask([("GET", fence) for fence in fences])
    seen = max((value_of(*fence, int) or 0 for fence in zip(fences, found, strict=True) if fence[1]), default=0)
    if seen >= term:
        raise ResponseError(f"FENCED term {term} was given before: the newest is {seen}")


async def raise_fence(mesh: MeshAccess, model: str, term: Term, shards: Sequence[ShardId]) -> None:
    """Makes Redis refuse the scripts of every older leader, in these shards.

    Done by a script call that expires nothing: any script with a newer term raises the fence. Raises ResponseError
    FENCED if this leader is the older one.
    """
    expire = mesh.scripts.expire
    await mesh.scripts.run_together([expire((), LedShard(shard, model, term), tombstone_ms=0) for shard in shards])


async def recall(
    mesh: MeshAccess, model: str, term: Term, executors: Iterable[ExecutorId], shards: Sequence[ShardId]
) -> None:
    """Takes back what the leader before has laid out: no sequence takes a slot that this leader takes for free."""
    places = [(executor, shard) for executor in executors for shard in shards]
    exist = await mesh.links.ask([("EXISTS", mesh.keys.spares(shard, executor, model)) for executor, shard in places])
    calls = [
        mesh.scripts.recall(executor, LedShard(shard, model, term))
        for (executor, shard), exists in zip(places, exist, strict=True)
        if exists
    ]
    await mesh.scripts.run_together(calls)


async def rebuilt(mesh: MeshAccess, model: str, offers: Offers, now_ms: int, shards: Sequence[ShardId]) -> list[Event]:
    """The events that bring an empty state to what Redis holds. Take them in before any entry of the streams.

    now_ms  the clock of Redis, when the offers were read or later
    shards  that are read

    Sequences of lost executors are not among them: they come back through the starts stream when they are reclaimed.
    """
    # The time is the first event: a lost executor's registration then stays for the policy's time from now on.
    events: list[Event] = [Tick(now_ms, "rebuild"), await epochs_found(mesh, shards), *member_events({}, offers)]
    serving = [executor for executor, versions in sorted(offers.items()) if versions is not None]
    return [*events, *contended(await found(mesh, await owned_sequences(mesh, model, serving, shards)))]


def contended(found: Sequence[SequenceFound]) -> list[Event]:
    """What was found, by slot: one sequence holds it, or several do. A shard whose server has lost its newest writes
    brings sequences back whose slots others have by now.
    """
    holders = Counter(event.place for event in found)
    contenders = defaultdict[SlotAddress, list[SequenceId]](list)
    for event in found:
        if holders[event.place] > 1:
            contenders[event.place].append(event.sequence)
    alone = (event for event in found if holders[event.place] == 1)
    return [*alone, *(ContendersFound(place.executor, tuple(c), "rebuild") for place, c in contenders.items())]


async def epochs_found(mesh: MeshAccess, shards: Sequence[ShardId]) -> EpochsFound:
    """To be read when spare slots have been recalled, and before the live sequences are."""
    keys = mesh.keys
    newest = await mesh.links.ask([("GET", keys.epoch(shard)) for shard in shards])
    read = {shard: value_of(keys.epoch(shard), raw, _counter) for shard, raw in zip(shards, newest, strict=True) if raw}
    return EpochsFound({shard: Epoch(epoch) for shard, epoch in read.items() if epoch is not None})


def _counter(raw: bytes) -> int:
    if (count := int(raw)) >= COUNTED_MAX:
        raise ValueError(f"scripts begin anew at {count}")
    return count


async def owned_sequences(
    mesh: MeshAccess, model: str, executors: Iterable[ExecutorId], shards: Sequence[ShardId]
) -> list[SequenceId]:
    """Every sequence of the model that one of the executors owns, by executor, shard and name."""
    keys = mesh.keys
    names = [keys.owned(shard, executor, model) for executor in executors for shard in shards]
    replies = await mesh.links.ask([("SMEMBERS", name) for name in names])
    return [SequenceId(text_of(sequence)) for members in replies for sequence in sorted(members)]


async def found(mesh: MeshAccess, sequences: Sequence[SequenceId]) -> list[SequenceFound]:
    """The slots of the live ones among the sequences. A record that cannot be read is counted and left out."""
    keys = mesh.keys
    events: list[SequenceFound] = []
    for begin in range(0, len(sequences), RECORDS_PER_READ):
        chunk = sequences[begin : begin + RECORDS_PER_READ]
        asked = [("HMGET", keys.sequence(sequence).record, *FIELDS_READ) for sequence in chunk]
        for sequence, record in zip(chunk, await mesh.links.ask(asked), strict=True):
            if record[0] == LIVE:
                event = value_of(keys.sequence(sequence).record, record, partial(_found, sequence))
                if event is not None:
                    events.append(event)
    return events


def _found(sequence: SequenceId, record: Sequence[bytes]) -> SequenceFound:
    *placed, tenant = record
    _, owner, version, instance, slot, epoch = placed
    if not all(placed) or int(epoch) < 1:
        raise ValueError("a live sequence of no place")
    place = address(owner, version, instance, slot)
    return SequenceFound(sequence, place, Epoch(int(epoch)), "rebuild", text_of(tenant or b""))
