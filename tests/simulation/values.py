"""What keys of the twin hold: one class per type of Redis, with the operations that need more than a dict.

Order shows in a simulation, so nothing here iterates over a set: what Redis keeps unordered is kept in order of
insertion.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import inf


class HashValue(dict[bytes, bytes]):
    """Fields and values."""


class SetValue(dict[bytes, None]):
    """Members, in order of insertion."""


class ListValue(deque[bytes]):
    """Elements."""


class SortedSet:
    """Members ordered by (score, member)."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self.order)

    def put(self, member: bytes, score: float) -> None:
        """Adds a member, or gives it another score."""
        self.remove(member)
        self.scores[member] = score
        insort(self.order, (score, member))

    def remove(self, member: bytes) -> bool:
        """False when it is not there."""
        score = self.scores.pop(member, None)
        if score is None:
            return False
        del self.order[bisect_left(self.order, (score, member))]
        return True

    def between(self, low: tuple[float, bool], high: tuple[float, bool]) -> list[tuple[float, bytes]]:
        """Members by score; a bound is (score, whether it is exclusive)."""
        begin = bisect_right(self.order, low[0], key=_score) if low[1] else bisect_left(self.order, low[0], key=_score)
        end = bisect_left(self.order, high[0], key=_score) if high[1] else bisect_right(self.order, high[0], key=_score)
        return self.order[begin:end]


def _score(entry: tuple[float, bytes]) -> float:
    return entry[0]


EntryId = tuple[int, int]
"""Milliseconds and number."""

FIRST: EntryId = (0, 0)
LAST: EntryId = (1 << 64, 1 << 64)


class Stream:
    """Entries by id; ids only grow, also when every entry is gone."""

    def __init__(self) -> None:
        self.last: EntryId = FIRST
        self.ids: list[EntryId] = []
        self.fields: dict[EntryId, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, now_ms: int, fields: list[bytes]) -> EntryId:
        """Adds an entry under an id made of the time."""
        ms, number = self.last
        return self.append_as((now_ms, 0) if now_ms > ms else (ms, number + 1), fields)

    def append_as(self, entry: EntryId, fields: list[bytes]) -> EntryId:
        """Adds an entry under an id, which must be greater than the last one."""
        self.last = entry
        self.ids.append(entry)
        self.fields[entry] = fields
        return entry

    def remove(self, entry: EntryId) -> bool:
        """False when it is not there."""
        if self.fields.pop(entry, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry)]
        return True

    def trim(self, minimum: EntryId) -> int:
        """Removes what is older; how many."""
        gone = self.ids[: bisect_left(self.ids, minimum)]
        del self.ids[: len(gone)]
        for entry in gone:
            del self.fields[entry]
        return len(gone)

    def between(self, low: EntryId, high: EntryId) -> list[EntryId]:
        """Ids from low to high, both included."""
        return self.ids[bisect_left(self.ids, low) : bisect_right(self.ids, high)]

    def after(self, entry: EntryId) -> list[EntryId]:
        """Ids greater than one."""
        return self.ids[bisect_right(self.ids, entry) :]


def score_text(score: float) -> bytes:
    """A score as Redis writes it."""
    if score in (inf, -inf):
        return b"inf" if score > 0 else b"-inf"
    return b"%d" % score if score == int(score) else b"%.17g" % score


def entry_text(entry: EntryId) -> bytes:
    """An entry's id as Redis writes it."""
    return b"%d-%d" % entry
