"""A leader's state as a value that can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.slots import SlotAddress
from scheduler.core.state import ExecutorPhase, LeaderState, SequencePhase
from shared.contract.ids import Epoch, ExecutorId, SequenceId


@dataclass(frozen=True, slots=True)
class StateView:
    """Sequences with slots, waiting sequences, and executors with phases."""

    live: tuple[tuple[SequenceId, SlotAddress, Epoch], ...]
    waiting: tuple[tuple[str, SequenceId, bool], ...]
    executors: tuple[tuple[ExecutorId, ExecutorPhase], ...]


def view(state: LeaderState) -> StateView:
    placed = [(s.sequence, s.place, s.epoch) for s in state.sequences.values()]
    return StateView(
        live=tuple(sorted((sequence, place, epoch) for sequence, place, epoch in placed if place is not None)),
        waiting=tuple(
            (version, waiting.sequence, state.sequences[waiting.sequence].phase is SequencePhase.MOVING)
            for version, backlog in sorted(state.backlogs.items())
            for waiting in backlog.in_order()
        ),
        executors=tuple(sorted((e.executor, e.phase) for e in state.executors.values())),
    )
