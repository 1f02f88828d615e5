"""Changes of a sequence's phase, by the table of legal ones. Only `scheduler.core.decide` and its parts make them."""

from __future__ import annotations

from scheduler.core.state import SEQUENCE_MOVES, LeaderState, Sequence, SequencePhase


def move(state: LeaderState, sequence: Sequence, how: str, cause: str) -> None:
    """Changes the phase; who holds a slot, and who is being asked for it, is kept in the picture."""
    before = sequence.phase
    after = SequencePhase(state.history.step(SEQUENCE_MOVES, sequence.sequence, how, before, cause))
    sequence.phase = after
    tenants = state.tenants(sequence.version)
    if before is SequencePhase.LIVE:
        tenants.remove(sequence.sequence)
    if after is SequencePhase.LIVE:
        tenants.add(sequence.sequence)
    tenants.asked += (after is SequencePhase.YIELDING) - (before is SequencePhase.YIELDING)
