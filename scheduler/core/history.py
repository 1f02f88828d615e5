"""Checks each move of a sequence or an executor against a table of legal moves, and remembers the last moves.

Late and repeated events are recognised before they become a move. So an illegal move is always a mistake in this code.
It raises an error that tells the recent moves of that sequence or executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Phase = TypeVar("Phase", bound=str)

HISTORY_MOVES_MAX = 512
"""Moves remembered per model, over all sequences and executors: about 100 KB, and a thousand models may be led."""


class Move(NamedTuple):
    """One change of phase: of which subject, by which move, from and to which phase, caused by which event."""

    subject: str
    move: str
    before: str
    after: str
    cause: str


class IllegalMoveError(Exception):
    """The core was about to do what its tables forbid; its state cannot be trusted and is to be rebuilt."""


class History:
    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=HISTORY_MOVES_MAX)

    def step(
        self, table: Mapping[tuple[Phase, str], Phase], subject: str, move: str, before: Phase, cause: str
    ) -> Phase:
        """The phase that a move leads to. Remembers the move.

        Raises IllegalMoveError, with the subject's remembered moves, if the table does not have it.
        """
        after = table.get((before, move))
        if after is None:
            known = [one for one in self._moves if one.subject == subject]
            story = "".join(f"\n  {one.move}: {one.before} -> {one.after} ({one.cause})" for one in known) or " -"
            raise IllegalMoveError(f"'{subject}' is {before}: it cannot be {move} ({cause}); before that:{story}")
        self._moves.append(Move(subject, move, before, after, cause))
        return after
