"""An executor that shall leave: the sequences that keep it here, and how an operator asks for it.

A sequence whose state the mesh holds goes to another executor between two steps. A sequence whose state only its model
holds (`self`, in Triton's python models) can end here and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shared.contract.ids import ExecutorId, SequenceId
from shared.contract.record import DURABLE, LIVE, STATE
from shared.process import logs
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.reading import text_of
from shared.store.redis_client import CONNECTION_LOST


async def models_that_stay(redis: Redis, keys: Keyspace, executor: ExecutorId, models: Iterable[str]) -> set[str]:
    """The models of which an executor owns a sequence whose state is nowhere else.

    Raises one of `CONNECTION_LOST`.
    """
    places = [(model, shard) for model in sorted(set(models)) for shard in keys.shard_ids()]
    if not places:
        return set()
    pipe = redis.pipeline(transaction=False)
    for model, shard in places:
        pipe.smembers(keys.owned(shard, executor, model))
    owned = [
        (model, SequenceId(text_of(name)))
        for (model, _), members in zip(places, await pipe.execute(), strict=True)
        for name in members
    ]
    pipe = redis.pipeline(transaction=False)
    for _, sequence in owned:
        pipe.hmget(keys.sequence(sequence).record, STATE, DURABLE)
    if not owned:
        return set()
    return {
        model
        for (model, _), (state, durable) in zip(owned, await pipe.execute(), strict=True)
        if state == LIVE and durable != b"1"
    }


class Draining:
    """Whether an operator wants this process to own nothing (`seqmesh drain`), named by its name or by an executor id.

    executor  the id of the present registration, or of the last one
    """

    def __init__(self, membership: Membership, name: str, *, period_s: float) -> None:
        self._membership = membership
        self._name = name
        self._period_s = period_s
        self.executor = ExecutorId("")

    async def begun(self) -> None:
        """Returns when the operator wants it."""
        while not await self._is_wanted(default=False):  # noqa: ASYNC110 - the wish lies in Redis
            await asyncio.sleep(self._period_s)

    async def over(self) -> None:
        """Returns when the operator does not want it (any more)."""
        if await self._is_wanted(default=True):
            logs.info("drained, not serving", executor=self.executor or self._name, remedy="seqmesh drain --undo")
        while await self._is_wanted(default=True):  # noqa: ASYNC110 - as above
            await asyncio.sleep(self._period_s)

    async def _is_wanted(self, *, default: bool) -> bool:
        """default: the answer while Redis cannot be asked"""
        try:
            return await self._membership.is_drained(self._name, self.executor)
        except CONNECTION_LOST:
            return default
