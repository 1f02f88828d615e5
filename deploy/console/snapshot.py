"""What one reading of the mesh found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.operate.operating import ExecutorHolding
from shared.contract.ids import ExecutorId, SequenceId
from shared.contract.messages import ModelRecord
from shared.statistics.reports import ExecutorReport
from shared.statistics.tally import Counts, ModelLoad
from shared.store.company import ServiceLine
from shared.store.sequence_status import SequenceStatus
from shared.store.waiting_line import WaitingLine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh at one moment.

    at_ms       clock of Redis, ms since 1970
    took_ms     how long the reading took
    executors   with the number of sequences that each owns, by model
    usable      ids of those that can own a sequence, read behind the sequences: a lost one whose sequences have other
                owners is none of them
    reports     of executors, by their ids
    drained     names and ids of executors that an operator has emptied
    services    gateways, schedulers and executors that tell their release
    records     the published models
    counts      statistics since each load
    lines       the waiting line of each model with sequences
    live        of each model with sequences: how many live, in a slot or without one
    queued      stateless requests that no executor has taken yet, by model and version
    sequences   those that are followed one by one: all that hold a slot, or held one, if `is_complete`; else none
    watched     sequences that a page looks at; None for one that the mesh does not know
    """

    at_ms: int
    took_ms: float = 0.0
    executors: Sequence[ExecutorHolding] = ()
    usable: frozenset[ExecutorId] = frozenset()
    reports: Mapping[str, ExecutorReport] = field(default_factory=dict[str, ExecutorReport])
    drained: frozenset[str] = frozenset()
    services: Sequence[ServiceLine] = ()
    records: Mapping[str, ModelRecord] = field(default_factory=dict[str, ModelRecord])
    counts: Mapping[ModelLoad, Counts] = field(default_factory=dict[ModelLoad, Counts])
    lines: Mapping[str, WaitingLine] = field(default_factory=dict[str, WaitingLine])
    live: Mapping[str, int] = field(default_factory=dict[str, int])
    queued: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    sequences: Sequence[SequenceStatus] = ()
    is_complete: bool = True
    watched: Mapping[SequenceId, SequenceStatus | None] = field(default_factory=dict[SequenceId, SequenceStatus | None])


def unserved_loads(now: Snapshot) -> list[ModelLoad]:
    """The newest versions of models that no living executor serves, but whose sequences are open."""
    served = {load.model for load in served_loads(now.executors, now.records)}
    return [
        ModelLoad(model, record.versions[-1], record.generation)
        for model, record in sorted(now.records.items())
        if model not in served and (now.live.get(model) or now.lines.get(model, WaitingLine()).first > 0)
    ]


def served_loads(executors: Sequence[ExecutorHolding], records: Mapping[str, ModelRecord]) -> list[ModelLoad]:
    """The loads of models that living executors serve, by name and version."""
    served = {
        (one.model, one.version)
        for holding in executors
        if holding.member.usable
        for one in holding.registration.models
    }
    return [
        ModelLoad(model, version, records[model].generation)
        for model, version in sorted(served)
        if model in records and version in records[model].versions
    ]
