"""Implicit state on its way to Redis and back.

A checkpoint is a hash. Field `n` is the step that it belongs to. Then there is one field per state tensor (`s:` and the
name of the state's input) with the encoded tensor: dtype and shape travel with the bytes, because the shape of a
variable-size state changes. A state that grows has a field for each of its parts (`shared.contract.state_fields`), and
a checkpoint writes those that are new. In a traced sequence, field `t` is the trace context of the step, to which the
next owner's first span links. Only `commit` writes a checkpoint, atomically with the record. Reading it needs no
script, because only the owner writes, and the reader is the owner.

A model that keeps its state itself, and has methods to hand it out, has one field `m` instead of the tensors, with the
whole state. Were the state's own tensors fields, those of an earlier step with other names would stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from executor.core.state import Checkpoint, StepRange, VoidCause
from executor.engine.base import RowError, RowResult
from shared.contract.ids import Epoch, SequenceId, StepNumber
from shared.contract.messages import encode
from shared.contract.record import (
    CANCELLED_STEPS,
    CHECKPOINTED,
    COMMITTED,
    DURABLE,
    EARLIER_STARTS,
    EPOCH,
    FAILED,
    FAILED_STEPS,
    GIVEN_UP,
    LIVE,
    MARK,
    START,
    STATE,
    TOMBSTONES,
    VOID_CAUSE,
    VOID_SINCE,
)
from shared.contract.state_fields import MODEL_FIELD, STATE_FIELD, checkpointed_states
from shared.contract.tensors import Tensor
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of

TRACE_FIELD = "t"
FIELDS_READ = [
    *(STATE, EPOCH, CHECKPOINTED, COMMITTED, START, VOID_SINCE, VOID_CAUSE),
    *(CANCELLED_STEPS, FAILED_STEPS, GIVEN_UP, MARK, DURABLE, EARLIER_STARTS),
]
"""Fields that are read of a record, in the order in which `_read` takes them."""
VOID_CAUSES = {cause.encode(): cause for cause in VoidCause}


def checkpoint_fields(row: RowResult | RowError, traceparent: str) -> list[tuple[str, bytes]]:
    """The fields that a step's checkpoint writes, for `commit`: state tensors, or what the model's own method gave, and
    the trace context of the step ("" if it is not traced).

    Without state there is no checkpoint, and then the trace context is not kept either.
    """
    fields: list[tuple[str, bytes]] = []
    if isinstance(row, RowResult) and (row.states or row.grown):
        fields += ((STATE_FIELD + name, encode(tensor)) for name, tensor in row.states.items())
        fields += chain.from_iterable(grown.fields for grown in row.grown)
    if row.model_state:
        fields.append((MODEL_FIELD, row.model_state))
    if fields and traceparent:
        fields.append((TRACE_FIELD, traceparent.encode()))
    return fields


def begins_anew(row: RowResult | RowError) -> bool:
    """Whether no other field of an earlier checkpoint may stay beside these."""
    return isinstance(row, RowResult) and bool(row.grown) and any(grown.anew for grown in row.grown)


def _read(record: Sequence[bytes | None], fields: Mapping[bytes, bytes], key: str) -> Checkpoint | None:
    """Reads a record and a checkpoint; None for a sequence without an owner. A state that cannot be read is lost.
    Raises one of `FAILURES` for a record that cannot be read.

    key  the checkpoint's
    """
    state, epoch, checkpointed, committed, start, void_since, void_cause, cancelled, failed, given_up = record[:10]
    mark, durable, earlier_starts = record[10:]
    if state != LIVE and state not in TOMBSTONES:
        return None
    last, saved = int(committed or 0), int(checkpointed or -1)
    if state == LIVE and not 0 <= saved <= last:
        # It would be waited for ever for steps that were answered, or that nobody has sent.
        raise ValueError(f"step {last} is committed, and a checkpoint is of step {saved}")
    starts = map(int, [*(earlier_starts or b"").split(), start or b"0"])
    void = VOID_CAUSES.get(void_cause or FAILED, VoidCause.LOST) if void_since is not None else None
    if int(given_up or 0) == last + 1:
        # The next step is given up. Its state is not loaded either, since loading it may be what killed the owners.
        void = void or VoidCause.LOST
    if durable != b"1" and last:
        # The mesh does not hold the state, and the engine that did is not here.
        void = void or VoidCause.LOST
    states: Mapping[str, Tensor] | None = {}
    if void is None:
        states = value_of(key, fields, checkpointed_states)
        void = VoidCause.LOST if states is None else None
    return Checkpoint(
        Epoch(int(epoch or 0)),
        StepNumber(saved),
        StepNumber(last),
        StepNumber(max((step for step in starts if step <= last), default=0)),
        void,
        traceparent=text_of(fields.get(TRACE_FIELD.encode(), b"")),
        cancelled=frozenset(StepNumber(int(step)) for step in (cancelled or b"").split()),
        failed=tuple(_range(text) for text in (failed or b"").split()),
        states=states or {},
        model_state=fields.get(MODEL_FIELD.encode()),
        mark=text_of(mark or b""),
        is_over=state != LIVE,
    )


def _range(text: bytes) -> StepRange:
    first, _, last = text.partition(b"-")
    return StepNumber(int(first)), StepNumber(int(last))


async def read_checkpoints(
    redis: Redis, keys: Keyspace, sequences: Sequence[SequenceId]
) -> dict[SequenceId, Checkpoint]:
    """Records and checkpoints of many sequences in one round trip. A sequence is left out if it waits for an owner, has
    no record, or its record cannot be read.
    """
    async with redis.pipeline(transaction=False) as pipe:
        for sequence in sequences:
            own = keys.sequence(sequence)
            pipe.hmget(own.record, FIELDS_READ)
            pipe.hgetall(own.checkpoint)
        replies = await pipe.execute()
    found: dict[SequenceId, Checkpoint] = {}
    for index, sequence in enumerate(sequences):
        own = keys.sequence(sequence)
        record, fields = replies[2 * index : 2 * index + 2]
        checkpoint = value_of(own.record, record, partial(_read, fields=fields, key=own.checkpoint))
        if checkpoint is not None:
            found[sequence] = checkpoint
    return found
