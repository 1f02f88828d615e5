"""A move that the tables forbid is refused, with the story of whoever was to make it."""

from __future__ import annotations

import pytest

from scheduler.core.history import History, IllegalMoveError
from scheduler.core.state import SEQUENCE_MOVES, SequencePhase


def test_an_illegal_move_tells_what_its_subject_did_before() -> None:
    history = History()
    history.step(SEQUENCE_MOVES, "a", "begun", SequencePhase.ABSENT, "starts 1-0")
    history.step(SEQUENCE_MOVES, "b", "found", SequencePhase.ABSENT, "rebuild")

    with pytest.raises(IllegalMoveError) as refused:
        history.step(SEQUENCE_MOVES, "a", "over", SequencePhase.WAITING, "feed 2-0")

    assert "'a' is waiting: it cannot be over (feed 2-0); before that:\n  begun: absent -> waiting (starts 1-0)" == str(
        refused.value
    )
