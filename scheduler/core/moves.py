"""Changes a sequence's phase by the table of legal moves. Only `scheduler.core.decide` and its parts call this."""

from __future__ import annotations

from scheduler.core.state import SEQUENCE_MOVES, LeaderState, Sequence, SequencePhase


def move(state: LeaderState, sequence: Sequence, how: str, cause: str) -> None:
    """Changes the phase of a sequence, and keeps its version's `Tenants` in step with it."""
    before = sequence.phase
    after = SequencePhase(state.history.step(SEQUENCE_MOVES, sequence.sequence, how, before, cause))
    sequence.phase = after
    tenants = state.tenants(sequence.version)
    if before is SequencePhase.LIVE:
        tenants.remove(sequence.sequence)
    if after is SequencePhase.LIVE:
        tenants.add(sequence.sequence)
    tenants.asked += (after is SequencePhase.YIELDING) - (before is SequencePhase.YIELDING)
