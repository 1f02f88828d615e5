"""Describes paged sequences that expire, for the log, where their model asks for it (`timeout_action: DESCRIBE`).

The executor describes a sequence that expires in a slot. A paged sequence has no executor: its state is its checkpoint.
The checkpoint is removed when the sequence expires, so it is read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from scheduler.mesh import MeshAccess
from shared.contract.ids import SequenceId
from shared.contract.messages import ModelRecord
from shared.contract.record import COMMITTED, PAGED, STATE
from shared.contract.state_fields import checkpointed_states
from shared.contract.tensors import described
from shared.store.reading import value_of


async def paged_descriptions(
    mesh: MeshAccess, model: str, sequences: Iterable[SequenceId]
) -> Mapping[SequenceId, Mapping[str, object]]:
    """Descriptions of the paged ones among the sequences, if the model asks for it; else none.

    A description has the fields of the log: `last_step`, and `state` after that step, with each tensor's name,
    datatype, shape, mean and norm. Sequences in a slot are left out: their checkpoint may be older than their state.
    Raises one of `CONNECTION_LOST`.
    """
    looked_at = list(sequences)
    if not looked_at or not _is_asked_for(await mesh.membership.model(model)):
        return {}
    found: dict[SequenceId, Mapping[str, object]] = {}
    asked = [("HMGET", mesh.keys.sequence(sequence).record, STATE, COMMITTED) for sequence in looked_at]
    for sequence, (state, step) in zip(looked_at, await mesh.links.ask(asked), strict=True):
        if state == PAGED:
            # One after the other: each may have many MiB.
            checkpoint = mesh.keys.sequence(sequence).checkpoint
            fields = await mesh.redis.hgetall(checkpoint)
            if description := value_of(checkpoint, fields, partial(_description, step)):
                found[sequence] = description
    return found


def _description(step: bytes, fields: Mapping[bytes, bytes]) -> Mapping[str, object]:
    return {"last_step": int(step), "state": described(checkpointed_states(fields))}


def _is_asked_for(record: ModelRecord | None) -> bool:
    batching = record.config.sequence_batching if record is not None else None
    return batching is not None and batching.describe_on_expiry
