"""Ends the idle sequences of a model that was loaded again (triton-spec 1.11), and gives their slots back.

They are looked for in Redis, not in memory, because some may have been assigned and not have come here yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor.connections import RedisConnections
from executor.sequences.sequence_model import SequenceModel
from shared.contract.ids import ExecutorId, SequenceId, ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.store.reading import text_of


async def end_outdated(
    connections: RedisConnections, executor: ExecutorId, model: SequenceModel, *, tombstone_ms: int
) -> int:
    """Ends the idle sequences of earlier loads; returns how many. Safe to repeat. Raises one of `CONNECTION_LOST`."""
    count = 0
    for shard, sequences in (await _owned(connections, executor, model.model)).items():
        # In parts, because a script call blocks Redis for every sequence that it carries.
        for begin in range(0, len(sequences), SCRIPT_STEPS_MAX):
            call = connections.scripts.reload(
                sequences[begin : begin + SCRIPT_STEPS_MAX],
                shard=shard,
                executor=executor,
                model=model.model,
                version=model.serves.version,
                mark=model.mark,
                tombstone_ms=tombstone_ms,
            )
            count += sum(await connections.scripts.run(call))
    return count


async def _owned(
    connections: RedisConnections, executor: ExecutorId, model: str
) -> dict[ShardId, Sequence[SequenceId]]:
    pipe = connections.commands.pipeline(transaction=False)
    shards = connections.keys.shard_ids()
    for shard in shards:
        pipe.smembers(connections.keys.owned(shard, executor, model))
    found = zip(shards, await pipe.execute(), strict=True)
    return {shard: [SequenceId(text_of(name)) for name in sorted(names)] for shard, names in found}
