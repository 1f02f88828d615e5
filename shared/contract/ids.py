"""Types of the ids that cross a boundary.

Two ids that are both strings must not be mixed up; the type checker finds it. `CorrelationId` keeps the client's type,
because in the protocol 42 and "42" are different sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import xxhash

from shared.contract.limits import CORRELATION_ID_CHARS_MAX

type_tag = {int: "i", str: "s"}

ShardId = NewType("ShardId", int)
"""0 .. shards-1; the hash tag of every key of the shard's sequences."""
ExecutorId = NewType("ExecutorId", str)
"""One registration of an executor process: `<name>-<nonce>`. Never used twice."""
GatewayId = NewType("GatewayId", str)
SchedulerId = NewType("SchedulerId", str)
SequenceId = NewType("SequenceId", str)
"""The mesh's own name of a sequence: model, requested version and typed correlation id. See `sequence_id`."""
InstanceIndex = NewType("InstanceIndex", int)
"""Which instance of a model inside its executor, from 0."""
SlotIndex = NewType("SlotIndex", int)
"""Place inside an instance's batch (direct) or among its candidates (oldest), from 0."""
Epoch = NewType("Epoch", int)
"""Fencing token of one ownership of a sequence; grows with every change of owner, unique within a shard."""
Term = NewType("Term", int)
"""Fencing token of one leadership over a model; grows with every change of leader."""
StepNumber = NewType("StepNumber", int)
"""1 for the first step that a sequence's record accepted; the numbers have no gaps."""

UINT64_DIGITS = 20
CorrelationId = int | str
"""uint64 or string of at most 128 characters, as the client gave it. 0 and "" mean: not part of a sequence."""


def sequence_id(model: str, requested_version: str, correlation_id: CorrelationId) -> SequenceId:
    """The mesh's name of a client's sequence.

    requested_version  the version that the client named, or "" if it left the choice to the server. A sequence without
                       a named version is pinned, at START, to the chosen one
    source             Triton scopes correlation ids to (model, version) and tells 42 from "42" (triton-spec 1.3)
    """
    return SequenceId(f"{model}|{requested_version}|{type_tag[type(correlation_id)]}{correlation_id}")


def correlation_id_from(text: str, *, string: bool) -> CorrelationId:
    """An id that was typed, or stands in a path. string: it is a text even if it looks like a number"""
    is_number = not string and text.isascii() and text.isdecimal() and len(text) <= UINT64_DIGITS
    return int(text) if is_number else text


def is_nameable(correlation_id: CorrelationId) -> bool:
    """Whether a request can name a sequence by this id: 0 and an empty text mean none, and texts have a bound."""
    if isinstance(correlation_id, int):
        return 0 < correlation_id < 1 << 64
    return 0 < len(correlation_id.encode()) <= CORRELATION_ID_CHARS_MAX


def correlation_id_of(sequence: SequenceId) -> CorrelationId:
    """The client's id, from the mesh's name of the sequence (a model's name has no `|`)."""
    typed = sequence.split("|", 2)[2]
    return int(typed[1:]) if typed[0] == "i" else typed[1:]


def entry_key(entry: str | bytes) -> tuple[int, int]:
    """A stream entry's id as numbers that compare in the order of the stream. "0" is before all."""
    milliseconds, _, number = (entry if isinstance(entry, str) else entry.decode()).partition("-")
    return int(milliseconds), int(number or 0)


def model_of(sequence: SequenceId) -> str:
    return sequence.split("|", 1)[0]


def requested_version_of(sequence: SequenceId) -> str:
    """The version that the sequence's client names in its requests, "" if it names none; of a sequence of an ensemble,
    @ and what names the ensemble and its step.
    """
    return sequence.split("|", 2)[1]


def follows_another(sequence: SequenceId) -> bool:
    """Whether the sequence belongs to an ensemble, and does what another one of it has done. Its requested version ends
    with a run of that one (`gateway.requests.ensembles.runs.scope_of`; in scripts `common.lua::follows_another`).
    """
    return "#" in requested_version_of(sequence).rpartition("/")[2]


def first_shards(count: int) -> tuple[ShardId, ...]:
    """The shards of a mesh on one server."""
    return tuple(map(ShardId, range(count)))


def shard_of(sequence: SequenceId, shards: Sequence[ShardId]) -> ShardId:
    """The shard that owns every key of a sequence; the same in every process and every release. shards: of the mesh"""
    # A mesh on one server has one shard, and every step asks for it several times.
    return shards[xxhash.xxh64_intdigest(sequence.encode()) % len(shards) if len(shards) > 1 else 0]
