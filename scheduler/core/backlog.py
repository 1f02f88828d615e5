"""The backlog: sequences that wait for a slot. Moving ones come before all others, and older before younger.

A paged sequence that comes back waits among the new ones, by the age of its step: so neither can starve the other. The
bounds are not here: `submit` refuses a START when too many wait that have not begun, or too many live; and there are
never more moving sequences than slots.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shared.contract.ids import SequenceId, ShardId


class Entry(NamedTuple):
    """A place in the starts streams. Compares by age: Redis clock (ms), sequence within the ms, then shard."""

    ms: int
    number: int
    shard: ShardId

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}@{self.shard}"


class BacklogEntry(NamedTuple):
    """One sequence in line; compares by its turn."""

    rank: int
    entry: Entry
    sequence: SequenceId


MOVING_RANK = 0
"""Before all others: its owner was lost, and it held a slot until now."""
WAITING_RANK = 1

COMPACT_SLACK = 64
"""Withdrawn sequences that a line may carry along, beyond as many as are really in it."""


class Backlog:
    """Sequences of one version, in line.

    Withdrawals from the middle only mark; what is marked goes when it comes up, or when it is more than half.
    """

    def __init__(self) -> None:
        self._line: list[BacklogEntry] = []
        self._members: dict[SequenceId, BacklogEntry] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._members

    def add(self, sequence: SequenceId, entry: Entry, *, moving: bool) -> None:
        """Puts a sequence in line."""
        assert sequence not in self._members
        waiting = BacklogEntry(MOVING_RANK if moving else WAITING_RANK, entry, sequence)
        self._members[sequence] = waiting
        heappush(self._line, waiting)

    def withdraw(self, sequence: SequenceId) -> None:
        """Takes a sequence out of the line, wherever it stands."""
        del self._members[sequence]
        if len(self._line) > 2 * len(self._members) + COMPACT_SLACK:
            self._line = list(self._members.values())
            heapify(self._line)

    def first(self) -> SequenceId | None:
        """Whose turn it is."""
        while self._line and self._members.get(self._line[0].sequence) != self._line[0]:
            heappop(self._line)
        return self._line[0].sequence if self._line else None

    def in_order(self) -> list[BacklogEntry]:
        """Everybody, next first."""
        return sorted(self._members.values())
