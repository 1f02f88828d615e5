"""The backlog: sequences that wait for a slot. Moving sequences come first, older before younger. Then tenants take
turns.

The next slot goes to the tenant that would have the fewest slots for its share with it, and of its sequences to the one
that has waited for longest. So where slots are short, each tenant has slots in proportion to its share, however many of
its sequences wait. Sequences without a tenant are one tenant; without tenants the older sequence comes first.

A paged sequence that has a new step waits among the new sequences, by the age of that step. So neither kind can starve
the other. The backlog needs no bound of its own: `submit` refuses a START when too many sequences wait for their first
slot or too many are live, and there are never more moving sequences than slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from shared.contract.ids import SequenceId, ShardId
from shared.contract.tenants import EVERY_OTHER


class Entry(NamedTuple):
    """An entry of a starts stream. Compares by age: Redis clock (ms), number within the ms, then shard."""

    ms: int
    number: int
    shard: ShardId

    @property
    def id(self) -> str:
        """Its name in its stream."""
        return f"{self.ms}-{self.number}"

    def __str__(self) -> str:
        return f"{self.id}@{self.shard}"


class BacklogEntry(NamedTuple):
    """One waiting sequence. Compares by its turn among those of its tenant."""

    rank: int
    entry: Entry
    sequence: SequenceId
    tenant: str = ""


MOVING_RANK = 0
"""For a moving sequence, before all others: it held a slot until its owner was lost."""
WAITING_RANK = 1

COMPACT_SLACK = 64
"""A heap may hold this many entries more than twice those that count, before it is built again."""

SOONEST = 0.0
"""Less than `Turns.after` ever is."""

MOVING_LINE = None
"""Of all tenants' moving sequences; the other lines are those of tenants, by name."""


class Turns(NamedTuple):
    """What decides which tenant is next.

    slots   that each tenant has; 0 for one that is not named
    shares  of each tenant, from 1; one that is not named has that of EVERY_OTHER, or 1
    """

    slots: Mapping[str, int]
    shares: Mapping[str, int]

    def after(self, tenant: str) -> float:
        """The slots that a tenant would have for its share with the next one."""
        share = self.shares.get(tenant) or self.shares.get(EVERY_OTHER, 1)
        return (self.slots.get(tenant, 0) + 1) / share


NO_TURNS = Turns({}, {})


class Backlog:
    """The waiting sequences of one version.

    A withdrawal leaves its entry in its heap, because finding it there would cost a search. The entry is dropped when
    it comes to the top, or when the withdrawn ones are more than half of all. So the first of each line waits.

    Nor are all tenants compared for each slot. Each that waits has an entry in another heap, with its turn as it was
    known, or one sooner. The entry is corrected when it comes to the top. So a turn that comes later is found out by
    itself, and of one that comes sooner the backlog is told (`reconsider`).
    """

    def __init__(self) -> None:
        self._lines: dict[str | None, list[BacklogEntry]] = {}
        self._heads: list[tuple[float, BacklogEntry]] = []
        self._members: dict[SequenceId, BacklogEntry] = {}
        self._size = 0  # entries in all lines, withdrawn ones too

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._members

    def add(self, sequence: SequenceId, entry: Entry, *, moving: bool, tenant: str = "") -> None:
        assert sequence not in self._members
        self._put(BacklogEntry(MOVING_RANK if moving else WAITING_RANK, entry, sequence, tenant))

    def _put(self, queued: BacklogEntry) -> None:
        self._members[queued.sequence] = queued
        line = self._lines.setdefault(_line_of(queued), [])
        heappush(line, queued)
        self._size += 1
        if line[0] is queued and queued.rank == WAITING_RANK:
            self.reconsider(queued.tenant)

    def withdraw(self, sequence: SequenceId) -> None:
        """Takes a sequence out, wherever it stands."""
        self._drop_withdrawn(_line_of(self._members.pop(sequence)))
        if self._size > 2 * len(self._members) + COMPACT_SLACK:
            members = list(self._members.values())
            self._lines, self._heads, self._size = {}, [], 0
            for queued in members:
                self._put(queued)

    def _drop_withdrawn(self, name: str | None) -> None:
        """Makes the first entry of a line one that waits, and removes a line without any."""
        line = self._lines[name]
        while line and self._members.get(line[0].sequence) != line[0]:
            heappop(line)
            self._size -= 1
        if not line:
            del self._lines[name]

    def reconsider(self, tenant: str) -> None:
        """The tenant's turn may come sooner than before: it has a slot less, or an older sequence waits."""
        if tenant in self._lines:
            heappush(self._heads, (SOONEST, self._lines[tenant][0]))
            if len(self._heads) > 2 * len(self._lines) + COMPACT_SLACK:
                self.reconsider_all()

    def reconsider_all(self) -> None:
        """Every tenant's turn may come sooner: the shares have changed."""
        firsts = sorted(line[0] for name, line in self._lines.items() if name != MOVING_LINE)
        # What is sorted is a heap.
        self._heads = [(SOONEST, first) for first in firsts]

    def in_turn(self, turns: Turns) -> Iterator[SequenceId]:
        """The sequences, each in its turn. Each is withdrawn, and counts in `turns`, before the next is asked for."""
        while moving := self._lines.get(MOVING_LINE):
            yield moving[0].sequence
        while self._heads:
            known = self._heads[0]
            tenant = known[1].tenant
            if tenant not in self._lines:
                heappop(self._heads)
            elif known < (turn := (turns.after(tenant), self._lines[tenant][0])):
                heapreplace(self._heads, turn)
            else:
                yield self._lines[tenant][0].sequence

    def in_order(self, turns: Turns = NO_TURNS) -> list[BacklogEntry]:
        """All waiting sequences in the order in which they would get slots if no slot became free meanwhile but those
        that they get; next first."""
        by_age = sorted(self._members.values())
        if len(self._lines.keys() - {MOVING_LINE}) < 2:
            # One tenant takes every turn.
            return by_age
        left, slots, order = Backlog(), Counter(turns.slots), list[BacklogEntry]()
        # What is put into a heap in its order has its place at once.
        for queued in by_age:
            left._put(queued)
        for sequence in left.in_turn(Turns(slots, turns.shares)):
            order.append(queued := self._members[sequence])
            slots[queued.tenant] += 1
            left.withdraw(sequence)
        return order


def _line_of(queued: BacklogEntry) -> str | None:
    return MOVING_LINE if queued.rank == MOVING_RANK else queued.tenant
