"""Compares what an executor knows of its sequences with what Redis holds after a restart or a failover.

A server that comes back with older data has lost steps, commits or assignments that it had acknowledged. Then the
states in the arenas and the steps taken in are newer than its data, and no sequence of this executor may go on from
them. Newer data in Redis (a sequence that was moved, or ended) needs no comparison: commits are refused by epoch then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, StepNumber, entry_key
from shared.contract.record import ACCEPTED, COMMITTED, EPOCH, OWNER
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of

RECORDS_PER_READ = 512


class Holding(NamedTuple):
    """A sequence that is owned here.

    committed  the last step that is known to be final
    accepted   the newest step that was taken in
    entry      the inbox entry of the newest step; "" if that is final
    """

    sequence: SequenceId
    epoch: Epoch
    committed: StepNumber
    accepted: StepNumber
    entry: str = ""


async def owned_by(redis: Redis, keys: Keyspace, executor: ExecutorId, model: str) -> dict[ShardId, list[SequenceId]]:
    """The sequences of a model that an executor owns, as Redis has them. Raises one of `CONNECTION_LOST`."""
    shards = keys.shards
    pipe = redis.pipeline(transaction=False)
    for shard in shards:
        pipe.smembers(keys.owned(shard, executor, model))
    found = zip(shards, await pipe.execute(), strict=True)
    return {shard: [SequenceId(text_of(name)) for name in names] for shard, names in found}


async def is_behind(redis: Redis, keys: Keyspace, executor: ExecutorId, holdings: Sequence[Holding]) -> bool:
    """Whether Redis lacks a part of the holdings. Raises one of `CONNECTION_LOST`.

    A step that it lacks may be replaced already: another one, of a gateway that was faster, has its number. So the
    entries of open steps are looked for, too.
    """
    last: dict[str, str] = {}
    for begin in range(0, len(holdings), RECORDS_PER_READ):
        chunk = holdings[begin : begin + RECORDS_PER_READ]
        pipe = redis.pipeline(transaction=False)
        for holding in chunk:
            pipe.hmget(keys.sequence(holding.sequence).record, [OWNER, EPOCH, ACCEPTED, COMMITTED])
        for record, holding in zip(await pipe.execute(), chunk, strict=True):
            lacks = partial(_lacks, executor=executor, holding=holding)
            lacking = value_of(keys.sequence(holding.sequence).record, record, lacks)
            if lacking:
                return True
            if lacking is not None and _is_open(record, holding):
                inbox = keys.inbox(keys.shard_of(holding.sequence), executor)
                last[inbox] = max(last.get(inbox, holding.entry), holding.entry, key=entry_key)
    # Redis loses its newest writes: where it has the last of an inbox's entries, it has those before it.
    for inbox, entry in last.items():
        if not await redis.xrange(inbox, entry, entry):
            return True
    return False


def _lacks(record: Sequence[bytes | None], executor: ExecutorId, holding: Holding) -> bool:
    owner, epoch, accepted, committed = record
    # A higher epoch is a newer owner, and nothing that Redis lacks; a lower or missing one is older data.
    if int(epoch or 0) != holding.epoch:
        return int(epoch or 0) < holding.epoch
    # The counter of epochs may be older too: then another owner may have got the same epoch.
    is_others = owner is not None and owner != executor.encode()
    return is_others or int(committed or 0) < holding.committed or int(accepted or 0) < holding.accepted


def _is_open(record: Sequence[bytes | None], holding: Holding) -> bool:
    """Whether the newest step is not final in Redis, whose record can be read: then its entry is in the inbox."""
    _, epoch, _, committed = record
    return bool(holding.entry) and int(epoch or 0) == holding.epoch and int(committed or 0) < holding.accepted
