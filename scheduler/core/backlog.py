"""The backlog: sequences that wait for a slot. Moving sequences come first, then all others; older before younger.

A paged sequence that has a new step waits among the new sequences, by the age of that step. So neither kind can starve
the other. The backlog needs no bound of its own: `submit` refuses a START when too many sequences wait for their first
slot or too many are live, and there are never more moving sequences than slots.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shared.contract.ids import SequenceId, ShardId


class Entry(NamedTuple):
    """An entry of a starts stream. Compares by age: Redis clock (ms), number within the ms, then shard."""

    ms: int
    number: int
    shard: ShardId

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}@{self.shard}"


class BacklogEntry(NamedTuple):
    """One waiting sequence. Compares by its turn."""

    rank: int
    entry: Entry
    sequence: SequenceId


MOVING_RANK = 0
"""For a moving sequence, before all others: it held a slot until its owner was lost."""
WAITING_RANK = 1

COMPACT_SLACK = 64
"""The heap may hold this many withdrawn sequences more than it holds waiting ones, before it is built again."""


class Backlog:
    """The waiting sequences of one version.

    A withdrawal leaves its entry in the heap, because finding it there would cost a search. The entry is dropped when
    it comes to the top, or when the withdrawn ones are more than half of the heap.
    """

    def __init__(self) -> None:
        self._line: list[BacklogEntry] = []
        self._members: dict[SequenceId, BacklogEntry] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._members

    def add(self, sequence: SequenceId, entry: Entry, *, moving: bool) -> None:
        assert sequence not in self._members
        queued = BacklogEntry(MOVING_RANK if moving else WAITING_RANK, entry, sequence)
        self._members[sequence] = queued
        heappush(self._line, queued)

    def withdraw(self, sequence: SequenceId) -> None:
        """Takes a sequence out, wherever it stands."""
        del self._members[sequence]
        if len(self._line) > 2 * len(self._members) + COMPACT_SLACK:
            self._line = list(self._members.values())
            heapify(self._line)

    def first(self) -> SequenceId | None:
        """The sequence whose turn it is; None if none waits."""
        while self._line and self._members.get(self._line[0].sequence) != self._line[0]:
            heappop(self._line)
        return self._line[0].sequence if self._line else None

    def in_order(self) -> list[BacklogEntry]:
        """All waiting sequences, next first."""
        return sorted(self._members.values())
