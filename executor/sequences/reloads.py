"""Ends the idle sequences of a model that was loaded again (triton-spec 1.11) or unloaded, and gives their slots back.

They are looked for in Redis, not in memory, because some may have been assigned and not have come here yet.
"""

from __future__ import annotations

from executor.connections import RedisConnections
from executor.sequences.holdings import owned_by
from executor.sequences.sequence_model import SequenceModel
from shared.contract.ids import ExecutorId
from shared.contract.limits import SCRIPT_STEPS_MAX


async def end_outdated(
    connections: RedisConnections, executor: ExecutorId, model: SequenceModel, *, mark: str, tombstone_ms: int
) -> int:
    """Ends the idle sequences of other loads than the one of this mark; returns how many. Safe to repeat. Raises one of
    `CONNECTION_LOST`.

    mark  "": of every load whose sequences have one
    """
    count = 0
    owned = await owned_by(connections.commands, connections.keys, executor, model.model)
    for shard, names in owned.items():
        sequences = sorted(names)
        # In parts, because a script call blocks Redis for every sequence that it carries.
        for begin in range(0, len(sequences), SCRIPT_STEPS_MAX):
            call = connections.scripts.reload(
                sequences[begin : begin + SCRIPT_STEPS_MAX],
                shard=shard,
                executor=executor,
                model=model.model,
                version=model.serves.version,
                mark=mark,
                tombstone_ms=tombstone_ms,
            )
            count += sum(await connections.scripts.run(call))
    return count
