"""Checks each move of a sequence or an executor against a table of legal moves, and remembers the last moves.

Late and repeated events are recognised before they become a move. So an illegal move is always a mistake in this code.
It raises an error that tells the recent moves of that sequence or executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

HISTORY_MOVES_MAX = 4096
"""Moves remembered per model, over all sequences and executors."""


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
    """The last moves, oldest first."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=HISTORY_MOVES_MAX)

    def of(self, subject: str) -> list[Move]:
        """The remembered moves of one sequence or executor, oldest first."""
        return [move for move in self._moves if move.subject == subject]

    def record(self, subject: str, move: str, before: str, after: str, cause: str) -> None:
        self._moves.append(Move(subject, move, before, after, cause))

    def illegal(self, subject: str, move: str, before: str, cause: str) -> IllegalMoveError:
        """The error for a move that the table does not have, with the subject's remembered moves."""
        story = "".join(f"\n  {m.move}: {m.before} -> {m.after} ({m.cause})" for m in self.of(subject))
        return IllegalMoveError(f"'{subject}' is {before}: it cannot be {move} ({cause}); before that:{story or ' -'}")

    def step(self, table: Mapping[tuple[str, str], str], subject: str, move: str, before: str, cause: str) -> str:
        """The phase that a move leads to. Remembers the move; raises IllegalMoveError if the table does not have it."""
        after = table.get((before, move))
        if after is None:
            raise self.illegal(subject, move, before, cause)
        self.record(subject, move, before, after, cause)
        return after
