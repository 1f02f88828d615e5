"""An executor that shall leave: the sequences that keep it here, and how an operator asks for it.

A sequence whose state the mesh holds goes to another executor between two steps. A sequence whose state only its model
holds (`self`, in Triton's python models) can end here and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from executor.sequences.holdings import owned_by
from shared.contract.ids import ExecutorId
from shared.contract.record import DURABLE, LIVE, STATE
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership

RECORDS_PER_READ = 256


async def models_that_stay(redis: Redis, keys: Keyspace, executor: ExecutorId, models: Iterable[str]) -> set[str]:
    """The models of which an executor owns a sequence whose state is nowhere else.

    Raises one of `CONNECTION_LOST`.
    """
    return {model for model in sorted(set(models)) if await _is_bound(redis, keys, executor, model)}


async def _is_bound(redis: Redis, keys: Keyspace, executor: ExecutorId, model: str) -> bool:
    """Whether the executor owns a sequence of the model whose state is nowhere else."""
    owned = [name for names in (await owned_by(redis, keys, executor, model)).values() for name in names]
    # In parts: there may be hundreds of thousands, and this process serves them meanwhile.
    for begin in range(0, len(owned), RECORDS_PER_READ):
        pipe = redis.pipeline(transaction=False)
        for sequence in owned[begin : begin + RECORDS_PER_READ]:
            pipe.hmget(keys.sequence(sequence).record, STATE, DURABLE)
        if any(state == LIVE and durable != b"1" for state, durable in await pipe.execute()):
            return True
    return False


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
        """Returns when the operator does not want it (any more). Warns: this process serves nothing meanwhile."""
        is_told = False
        while await self._is_wanted(default=True):
            is_told = is_told or await self._told()
            await asyncio.sleep(self._period_s)

    async def _told(self) -> bool:
        """Logs that this process is drained, and how it serves again. False while Redis cannot be asked."""
        for who in (self._name, self.executor):
            if await self._is_wanted(who, default=False):
                logs.warning("drained, not serving", executor=who, remedy=f"seqmesh drain {who} --undo")
                return True
        return False

    async def _is_wanted(self, *names: str, default: bool) -> bool:
        """Whether it is wanted under one of these names, by default under any.

        default  the answer while Redis cannot be asked
        """
        try:
            return await self._membership.is_drained(*(names or (self._name, self.executor)))
        except LOST_OR_REFUSED:
            return default
