"""A leader's state from Redis, when it begins to lead and after it has lost the connection.

First the fence: from then on no other scheduler changes anything of the model, only clients and executors do, and
what they do comes through the streams. Then the live sequences, from the executors' owned sets and the records. The
backlog is the starts stream itself, which the leader reads from its beginning, as it does the feed: entries there that
are older than this picture carry epochs it does not know, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from redis.asyncio import Redis

from scheduler.core.events import Event, SequenceFound, Tick
from scheduler.core.slots import SlotAddress
from scheduler.ingest import Offers, member_events
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, SlotIndex, Term
from shared.contract.record import EPOCH, INSTANCE, LIVE, OWNER, SLOT, STATE, VERSION
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of
from shared.store.redis_client import redis_now_ms
from shared.store.scripts import Scripts

RECORDS_PER_READ = 512
"""Records asked for in one round trip."""
FIELDS_READ = (STATE, OWNER, VERSION, INSTANCE, SLOT, EPOCH)
"""Of each record."""


async def raise_fence(scripts: Scripts, keys: Keyspace, model: str, term: Term) -> None:
    """Makes every older leader's scripts refuse, in every shard. Raises ResponseError FENCED if this one is older."""
    calls = [scripts.expire((), shard=shard, model=model, term=term, tombstone_ms=0) for shard in keys.shard_ids()]
    for outcome in await scripts.run_all(calls):
        if isinstance(outcome, Exception):
            raise outcome


async def rebuilt(redis: Redis, keys: Keyspace, model: str, offers: Offers) -> list[Event]:
    """Events that bring an empty state to what Redis holds; to be taken in before any entry of the streams.

    Sequences of lost executors are not among them: they come back through the starts stream when they are reclaimed.
    """
    # The time comes first: from now on a lost executor's registration stays for the policy's time.
    now_ms = await redis_now_ms(redis)
    events: list[Event] = [Tick(now_ms, "rebuild"), *member_events({}, offers)]
    serving = [executor for executor, versions in sorted(offers.items()) if versions is not None]
    owned = await owned_sequences(redis, keys, model, serving)
    return [*events, *await found(redis, keys, owned)]


async def owned_sequences(
    redis: Redis, keys: Keyspace, model: str, executors: Iterable[ExecutorId]
) -> list[SequenceId]:
    """Every sequence of the model that one of the executors owns; by executor, shard and name."""
    names = [keys.owned(shard, executor, model) for executor in executors for shard in keys.shard_ids()]
    replies = await _pipelined(redis, [("SMEMBERS", name) for name in names])
    return [SequenceId(text_of(sequence)) for members in replies for sequence in sorted(members)]


async def found(redis: Redis, keys: Keyspace, sequences: Sequence[SequenceId]) -> list[SequenceFound]:
    """The slots that those of the sequences hold which are live."""
    events: list[SequenceFound] = []
    for begin in range(0, len(sequences), RECORDS_PER_READ):
        chunk = sequences[begin : begin + RECORDS_PER_READ]
        asked = [("HMGET", keys.sequence(sequence).record, *FIELDS_READ) for sequence in chunk]
        for sequence, record in zip(chunk, await _pipelined(redis, asked), strict=True):
            if record[0] == LIVE:
                event = value_of(keys.sequence(sequence).record, record, partial(_found, sequence))
                if event is not None:
                    events.append(event)
    return events


def _found(sequence: SequenceId, record: Sequence[bytes]) -> SequenceFound:
    _, owner, version, instance, slot, epoch = record
    place = SlotAddress(
        ExecutorId(owner.decode()), version.decode(), InstanceIndex(int(instance)), SlotIndex(int(slot))
    )
    return SequenceFound(sequence, place, Epoch(int(epoch)), "rebuild")


async def _pipelined(redis: Redis, commands: Iterable[tuple[str, ...]]) -> list[Any]:
    # redis-py types a pipeline's commands as unions of sync and async; they are queued, and `execute` is awaited.
    pipe = cast("Any", redis.pipeline(transaction=False))
    for command in commands:
        pipe.execute_command(*command)
    return await pipe.execute()
