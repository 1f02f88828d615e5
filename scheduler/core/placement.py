"""Placement: which executor a sequence goes to, by consistent hashing with bounded loads.

The same sequence prefers the same executors whoever decides, and when an executor comes or goes few sequences change
their preference; the bound keeps the sequences even. Inside an executor `SlotTable.take` chooses.
"""

from __future__ import annotations

from scheduler.core.hashing import HashRing, bounded_capacity
from scheduler.core.slots import SlotTable
from shared.contract.ids import ExecutorId, SequenceId


class Ring:
    """Executors that serve one version, with their slots.

    load_factor    no executor is given more than this many times the mean, while another has room
    virtual_nodes  points of each executor on the ring
    """

    def __init__(self, load_factor: float, virtual_nodes: int) -> None:
        self._load_factor = load_factor
        self._ring = HashRing(virtual_nodes)
        self.tables: dict[ExecutorId, SlotTable] = {}

    def put(self, table: SlotTable) -> None:
        """An executor joins with these slots, or has these slots from now on."""
        self.tables[table.executor] = table
        self._ring.add(table.executor)

    def drop(self, executor: ExecutorId) -> None:
        """An executor leaves."""
        del self.tables[executor]
        self._ring.remove(executor)

    def loads(self) -> dict[ExecutorId, int]:
        """How many sequences each executor has that gives slots."""
        return {executor: table.load for executor, table in self.tables.items() if not table.served.closing}

    def has_room(self) -> bool:
        """Whether any executor has a free slot."""
        return any(not table.full for table in self.tables.values())

    def share(self, load_total: int) -> int:
        """The most sequences that an executor may have when all together have so many."""
        return bounded_capacity(load_total, len(self.loads()) or 1, self._load_factor)

    def prefers(self, sequence: SequenceId) -> ExecutorId:
        """The executor that the ring offers a sequence first."""
        return ExecutorId(next(self._ring.walk(sequence)))

    def choose(self, sequence: SequenceId, *, avoid: ExecutorId | None = None) -> SlotTable | None:
        """The sequence's executor: the first on its way round the ring with a free slot and less than its share.

        When nobody with a free slot is below its share (executors of unequal size), the first with a free slot; None
        when every slot is taken. avoid: only when no other has a free slot.
        """
        if not self.has_room():
            return None
        share = self.share(sum(self.loads().values()) + 1)
        fallbacks: list[SlotTable] = []
        for node in self._ring.walk(sequence):
            table = self.tables[ExecutorId(node)]
            if table.full:
                continue
            if table.load < share and table.executor != avoid:
                return table
            fallbacks.append(table)
        return min(fallbacks, key=lambda table: table.executor == avoid)
