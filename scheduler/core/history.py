"""What happened lately, and what may happen: moves of sequences and executors against a table of legal ones.

An illegal move is a mistake of ours, never of the world: late and repeated events are recognised before they become a
move. So it raises, and the error tells the story of the thing that moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

HISTORY_MOVES_MAX = 4096
"""Moves remembered per model, over all sequences and executors."""


class Move(NamedTuple):
    """One change: what, by which move, from where to where, and the event that caused it."""

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
        """What is remembered of one sequence, executor or slot."""
        return [move for move in self._moves if move.subject == subject]

    def record(self, subject: str, move: str, before: str, after: str, cause: str) -> None:
        """Remembers a move."""
        self._moves.append(Move(subject, move, before, after, cause))

    def illegal(self, subject: str, move: str, before: str, cause: str) -> IllegalMoveError:
        """The error for a move that the tables do not have, with the subject's story."""
        story = "".join(f"\n  {m.move}: {m.before} -> {m.after} ({m.cause})" for m in self.of(subject))
        return IllegalMoveError(f"'{subject}' is {before}: it cannot be {move} ({cause}); before that:{story or ' -'}")

    def step(self, table: Mapping[tuple[str, str], str], subject: str, move: str, before: str, cause: str) -> str:
        """Where a move leads, remembered; raises IllegalMoveError when the table does not have it."""
        after = table.get((before, move))
        if after is None:
            raise self.illegal(subject, move, before, cause)
        self.record(subject, move, before, after, cause)
        return after
