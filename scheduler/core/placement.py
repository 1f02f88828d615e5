"""Placement: chooses the executor of a sequence, by consistent hashing with bounded loads.

Every leader computes the same order of executors for a sequence, and few sequences change their order when an executor
comes or goes. The bound keeps the load even. Within an executor, `SlotTable.take` chooses the slot.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.slots import SlotTable
from shared.contract.hashing import HashRing, bounded_capacity, ring_of
from shared.contract.ids import ExecutorId, SequenceId


class Ring:
    """The executors that serve one version, with their slots.

    load_factor    while another executor has a free slot, none gets more sequences than this many times the mean
    virtual_nodes  points of each executor on the ring
    """

    def __init__(self, load_factor: float, virtual_nodes: int) -> None:
        self._load_factor = load_factor
        self._virtual_nodes = virtual_nodes
        self._ring: HashRing | None = None
        self.tables: dict[ExecutorId, SlotTable] = {}

    def put(self, table: SlotTable) -> None:
        """Adds an executor with its slots, or replaces its slots."""
        if table.executor not in self.tables:
            self._ring = None
        self.tables[table.executor] = table

    def drop(self, executor: ExecutorId) -> None:
        del self.tables[executor]
        self._ring = None

    def loads(self) -> dict[ExecutorId, int]:
        """The number of sequences per executor, without the executors that are closing this version."""
        return {executor: table.load for executor, table in self.tables.items() if not table.served.closing}

    def has_free_slot(self) -> bool:
        """Whether any executor has a free slot."""
        return any(not table.full for table in self.tables.values())

    def share(self, load_total: int) -> int:
        """The most sequences that one executor may have when all together have `load_total`."""
        return bounded_capacity(load_total, len(self.loads()) or 1, self._load_factor)

    def prefers(self, sequence: SequenceId) -> ExecutorId:
        """The first executor in the sequence's order."""
        return ExecutorId(next(self._order(sequence)))

    def choose(self, sequence: SequenceId, *, avoid: ExecutorId | None = None) -> SlotTable:
        """The executor for a sequence: the first in the sequence's order with a free slot and less than its share.

        If every executor with a free slot is at its share (executors may differ in size), the first with a free slot.
        There must be one.

        avoid  an executor to be chosen only when no other has a free slot
        """
        share = self.share(sum(self.loads().values()) + 1)
        fallbacks: list[SlotTable] = []
        for node in self._order(sequence):
            table = self.tables[ExecutorId(node)]
            if table.full:
                continue
            if table.load < share and table.executor != avoid:
                return table
            fallbacks.append(table)
        return min(fallbacks, key=lambda table: table.executor == avoid)

    def _order(self, sequence: SequenceId) -> Iterator[str]:
        # Made when it is asked for, so once for all executors that a leader finds at its start.
        if self._ring is None:
            self._ring = ring_of(frozenset(self.tables), self._virtual_nodes)
        return self._ring.walk(sequence)
