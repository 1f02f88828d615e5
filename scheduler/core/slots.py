"""Slots: the places in the executors' batches that live sequences hold, one table per executor and version.

A slot is free or taken by one sequence; nothing else. Taking a taken slot or freeing a free one raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from scheduler.core.history import IllegalMoveError
from shared.contract.ids import ExecutorId, InstanceIndex, SequenceId, SlotIndex


@dataclass(frozen=True, slots=True, order=True)
class SlotAddress:
    """One slot of the mesh."""

    executor: ExecutorId
    version: str
    instance: InstanceIndex
    slot: SlotIndex

    def __str__(self) -> str:
        return f"{self.executor}/{self.version}/{self.instance}/{self.slot}"


@dataclass(frozen=True, slots=True, order=True)
class OfferedVersion:
    """What an executor offers of one version: instances, each with so many slots (0 for a stateless model).

    closing   it gives no slot any more; sequences keep those that they have
    pageable  its sequences give up their slots while others wait
    idle_ms   no sequence expires sooner after its last step; 0: nobody knows
    """

    version: str
    instances: int
    slots: int
    closing: bool = False
    pageable: bool = False
    idle_ms: int = 0


class InstanceSlots:
    """The slots of one instance. Low ones are given first, so that a batch stays dense."""

    def __init__(self, slots: int) -> None:
        self.size = slots
        self.taken: dict[SlotIndex, SequenceId] = {}
        self.free = [SlotIndex(slot) for slot in range(slots)]  # a heap

    def take_lowest(self, sequence: SequenceId) -> SlotIndex:
        """Gives the lowest free slot; the caller has made sure that there is one."""
        slot = heappop(self.free)
        self.taken[slot] = sequence
        return slot

    def take_at(self, slot: SlotIndex, sequence: SequenceId) -> bool:
        """Gives one certain slot; False when it is taken or there is no such slot."""
        if slot in self.taken or not 0 <= slot < self.size:
            return False
        self.free.remove(slot)
        heapify(self.free)
        self.taken[slot] = sequence
        return True

    def release(self, slot: SlotIndex, sequence: SequenceId) -> None:
        """Takes a slot back from the sequence that holds it."""
        holder = self.taken.get(slot)
        if holder != sequence:
            raise IllegalMoveError(f"slot {slot} is held by {holder!r}: '{sequence}' cannot give it back")
        del self.taken[slot]
        heappush(self.free, slot)


class SlotTable:
    """All slots of one version on one executor."""

    def __init__(self, executor: ExecutorId, served: OfferedVersion) -> None:
        self.executor = executor
        self.served = served
        self.instances = [InstanceSlots(served.slots) for _ in range(served.instances)]
        self.load = 0

    @property
    def size(self) -> int:
        """All slots."""
        return self.served.instances * self.served.slots

    @property
    def full(self) -> bool:
        """No slot can be had here."""
        return self.served.closing or self.load >= self.size

    def take(self, sequence: SequenceId) -> SlotAddress:
        """A slot of the instance with the fewest sequences, the first of equals: instances fill evenly.

        source  Triton's free slots are a heap on the slot number, over all instances (triton-spec 1.3)
        """
        if self.full:
            raise IllegalMoveError(f"{self.executor} has no free slot of version {self.served.version}: '{sequence}'")
        index = min(range(len(self.instances)), key=lambda i: len(self.instances[i].taken))
        slot = self.instances[index].take_lowest(sequence)
        self.load += 1
        return SlotAddress(self.executor, self.served.version, InstanceIndex(index), slot)

    def take_at(self, place: SlotAddress, sequence: SequenceId) -> bool:
        """A certain slot, for a sequence that holds it in Redis; False when it is taken or does not exist."""
        if not 0 <= place.instance < len(self.instances):
            return False
        if not self.instances[place.instance].take_at(place.slot, sequence):
            return False
        self.load += 1
        return True

    def release(self, place: SlotAddress, sequence: SequenceId) -> None:
        """Takes a slot back."""
        self.instances[place.instance].release(place.slot, sequence)
        self.load -= 1

    def holders(self) -> list[tuple[SlotAddress, SequenceId]]:
        """Every taken slot, in order, with its sequence."""
        return [
            (SlotAddress(self.executor, self.served.version, InstanceIndex(index), slot), instance.taken[slot])
            for index, instance in enumerate(self.instances)
            for slot in sorted(instance.taken)
        ]
