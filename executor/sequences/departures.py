"""How idle sequences leave this executor before their slots are wanted by others.

A slot is a place for a state here, and a state that is in its checkpoint costs nothing to leave behind. So an executor
whose slots are nearly all taken gives up those of the sequences that were used least recently, many in one round trip.
Whoever comes next finds a free slot, and need not wait until the leader has asked for one (`scheduler.core.paging`,
which is still what happens where no sequence here can leave). Redis decides: a sequence whose next step was accepted
meanwhile stays.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from executor.connections import RedisConnections, insist
from executor.core.events import OwnershipOver
from executor.core.state import OwnedSequence
from executor.sequences.sequence_model import SequenceModel
from shared.contract.ids import ExecutorId, ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.process import logs


async def page_idle(model: SequenceModel, connections: RedisConnections, executor: ExecutorId) -> None:
    """Pages the least recently used sequences whenever too few slots are free, for ever."""
    while True:
        await model.leave_due.wait()
        model.leave_due.clear()
        while leaving := model.state.next_leaving(SCRIPT_STEPS_MAX):
            shards: dict[ShardId, list[OwnedSequence]] = defaultdict(list)
            for owned in leaving:
                shards[connections.keys.shard_of(owned.sequence)].append(owned)
            await asyncio.gather(*(_page(model, connections, executor, *one) for one in shards.items()))


async def _page(
    model: SequenceModel,
    connections: RedisConnections,
    executor: ExecutorId,
    shard: ShardId,
    leaving: Sequence[OwnedSequence],
) -> None:
    asked = [(owned.sequence, owned.epoch) for owned in leaving]
    call = connections.scripts.page(asked, shard=shard, executor=executor, model=model.model)
    paged = await insist("paging", partial(connections.scripts.run, call))
    for (sequence, epoch), is_paged in zip(asked, paged, strict=True):
        if is_paged:
            model.handle(OwnershipOver(sequence, epoch))
    logs.debug("idle sequences left", model=model.model, sequences=sum(paged), asked=len(asked))
