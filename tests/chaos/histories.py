"""Made-up histories: a sequence that was answered rightly, to be spoilt by a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.chaos import fold
from deploy.chaos.history import Attempt, AttemptOutcome, SequenceHistory
from deploy.chaos.scripts import Script


def script(values: Sequence[int], **changes: Any) -> Script:
    """A sequence of these values over a stream, one step at a time."""
    given: dict[str, Any] = {
        "index": 7,
        "correlation_id": "seven",
        "model": "chaos_oldest",
        "protocol": "stream",
        "numbered": True,
        "window": 1,
        "values": tuple(values),
        "pause_s": 0.0,
        "patience_s": 5.0,
        "hang_ups": (),
        "silent_at": 0,
        "ends": True,
    }
    return Script(**{**given, **changes})


def answered(step: int, state: fold.FoldState) -> Attempt:
    """Step n is sent at n s and answered half a second later."""
    return Attempt(step, 1, 0, float(step), step + 0.5, AttemptOutcome.ANSWERED, *state)


def refused(step: int, reason: str = "", *, last_step: int = -1, at_s: float | None = None, code: str = "") -> Attempt:
    """An attempt that the mesh refused, shortly after it was sent."""
    sent_s = step - 0.5 if at_s is None else at_s
    outcome = AttemptOutcome.REFUSED
    return Attempt(step, 1, 0, sent_s, sent_s + 0.1, outcome, reason=reason, last_step=last_step, text="no", code=code)


def history(values: Sequence[int], states: Sequence[fold.FoldState] | None = None, **changes: Any) -> SequenceHistory:
    """The sequence with these answers; by default the right ones."""
    given = fold.answers(values) if states is None else states
    return SequenceHistory(
        script(values, **changes), [answered(step, state) for step, state in enumerate(given, start=1)]
    )
