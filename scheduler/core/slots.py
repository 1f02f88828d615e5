"""Slots: the places that an executor has for sequences, each held by one live sequence. One table per executor and
version. Only the executor knows whether a slot is a place for a state or a row of the batch.

A slot is free, spare (`scheduler.core.spares`), taken by one sequence, or withheld (`LeaderState.withheld`). Freeing a
slot that the sequence does not hold raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from scheduler.core.history import IllegalMoveError
from shared.contract.ids import ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex


@dataclass(frozen=True, slots=True, order=True)
class SlotAddress:
    """Where a slot is: in an instance of an executor's version. Ordered as it is written."""

    executor: ExecutorId
    version: str
    instance: InstanceIndex
    slot: SlotIndex

    def __str__(self) -> str:
        return f"{self.executor}/{self.version}/{self.instance}/{self.slot}"


@dataclass(frozen=True, slots=True, order=True)
class OfferedVersion:
    """What an executor offers of one version.

    instances  number of instances
    slots      slots of each instance; 0 for a stateless model
    closing    no slot is given any more; sequences keep the slots that they have
    pageable   sequences give up their slots while others wait
    idle_ms    no sequence expires sooner than this after its last step; 0: not known
    """

    version: str
    instances: int
    slots: int
    closing: bool = False
    pageable: bool = False
    idle_ms: int = 0


class InstanceSlots:
    """The slots of one instance. Low slots are given first, so that a batch of rows by slot stays dense, and an engine
    needs memory for as few places as possible.

    There may be hundreds of thousands of slots, most of which are never used.

    spare     slots that are laid out in Redis (`scheduler.core.spares`), with the shard; a sequence may have one by now
    withheld  slots that nobody gets (`LeaderState.withheld`)
    """

    def __init__(self, slots: int) -> None:
        self.size = slots
        self.taken: dict[SlotIndex, SequenceId] = {}
        self.spare: dict[SlotIndex, ShardId] = {}
        self.withheld = set[SlotIndex]()
        self._given_back: list[SlotIndex] = []  # a heap, in which taken and spare slots may remain
        self._unused = SlotIndex(0)  # every free slot below it was given back

    @property
    def count(self) -> int:
        """The number of slots that are not free."""
        return len(self.taken) + len(self.spare) + len(self.withheld)

    def free(self) -> set[SlotIndex]:
        """The free slots, given back or never used."""
        known = {*self._given_back, *map(SlotIndex, range(self._unused, self.size))}
        return known - self.taken.keys() - self.spare.keys() - self.withheld

    def take_lowest(self, sequence: SequenceId) -> SlotIndex:
        """Gives the lowest free slot. There must be one."""
        slot = self._lowest()
        self.taken[slot] = sequence
        return slot

    def lay_out_lowest(self, shard: ShardId) -> SlotIndex:
        """Makes the lowest free slot a spare one. There must be one."""
        slot = self._lowest()
        self.spare[slot] = shard
        return slot

    def _lowest(self) -> SlotIndex:
        while self._given_back and self._is_held(self._given_back[0]):
            heappop(self._given_back)
        while self._is_held(self._unused):
            self._unused = SlotIndex(self._unused + 1)
        return min(self._given_back[0], self._unused) if self._given_back else self._unused

    @property
    def has_gap(self) -> bool:
        """Whether a free slot lies below a spare one."""
        return bool(self.spare) and self._lowest() < max(self.spare)

    def _is_held(self, slot: SlotIndex) -> bool:
        return slot in self.taken or slot in self.spare or slot in self.withheld

    def take_at(self, slot: SlotIndex, sequence: SequenceId) -> bool:
        """Gives a certain slot, free or spare. False when it is held, or does not exist."""
        if slot in self.taken or slot in self.withheld or not 0 <= slot < self.size:
            return False
        self.spare.pop(slot, None)
        self.taken[slot] = sequence
        return True

    def recall(self, shard: ShardId) -> None:
        """The slots that are spare in a shard are free."""
        for slot in list(self.spare):
            self.withdraw(slot, shard)

    def withdraw(self, slot: SlotIndex, shard: ShardId) -> None:
        """A slot is free, if it counts as spare in that shard."""
        if self.spare.get(slot) == shard:
            del self.spare[slot]
            heappush(self._given_back, slot)

    def release(self, slot: SlotIndex, sequence: SequenceId, spare_in: ShardId | None) -> None:
        """Takes a slot back from the sequence that holds it. spare_in: the shard in which it is spare now; None: it is
        free
        """
        holder = self.taken.get(slot)
        if holder != sequence:
            raise IllegalMoveError(f"slot {slot} is held by {holder!r}: '{sequence}' cannot give it back")
        del self.taken[slot]
        if spare_in is None:
            heappush(self._given_back, slot)
        else:
            self.spare[slot] = spare_in


class SlotTable:
    """The slots of one version at one executor: which are free, taken, withheld, or lent as spare ones."""

    def __init__(self, executor: ExecutorId, served: OfferedVersion) -> None:
        self.executor = executor
        self.served = served
        self.instances = [InstanceSlots(served.slots) for _ in range(served.instances)]
        self.load = 0
        """Slots that are taken or withheld."""

    @property
    def size(self) -> int:
        """The number of slots, free or taken."""
        return self.served.instances * self.served.slots

    @property
    def full(self) -> bool:
        """Whether no slot can be taken: all are taken or withheld, or the version is closing."""
        return self.served.closing or self.load >= self.size

    @property
    def unlent(self) -> int:
        """The number of slots that are free."""
        return self.size - sum(instance.count for instance in self.instances)

    def spares_in(self, shard: ShardId) -> int:
        """The number of slots that are spare in a shard."""
        return sum(laid_out_in == shard for instance in self.instances for laid_out_in in instance.spare.values())

    def take(self, sequence: SequenceId) -> SlotAddress:
        """Takes the lowest free slot of the instance with the fewest sequences, so that instances fill evenly.

        source  Triton's free slots are a heap on the slot number, over all instances (triton-spec 1.3)
        """
        if self.full or not self.unlent:
            raise IllegalMoveError(f"{self.executor} has no free slot of version {self.served.version}: '{sequence}'")
        index = self._emptiest()
        slot = self.instances[index].take_lowest(sequence)
        self.load += 1
        return SlotAddress(self.executor, self.served.version, index, slot)

    @property
    def has_gap(self) -> bool:
        """Whether a free slot lies below a spare one of its instance, so that low slots would not be given first."""
        return any(instance.has_gap for instance in self.instances)

    def lay_out(self, count: int, shard: ShardId) -> list[tuple[InstanceIndex, SlotIndex]]:
        """Makes as many slots spare as it can, in the order in which `take` would give them."""
        found: list[tuple[InstanceIndex, SlotIndex]] = []
        for _ in range(min(count, self.unlent)):
            index = self._emptiest()
            found.append((index, self.instances[index].lay_out_lowest(shard)))
        return found

    def _emptiest(self) -> InstanceIndex:
        return InstanceIndex(min(range(len(self.instances)), key=lambda index: self.instances[index].count))

    def is_slot(self, place: SlotAddress) -> bool:
        """Whether there is such a slot."""
        return 0 <= place.instance < len(self.instances) and 0 <= place.slot < self.served.slots

    def take_at(self, place: SlotAddress, sequence: SequenceId) -> bool:
        """Takes a certain slot, for a sequence that holds it in Redis. False when it is held, or does not exist."""
        if not self.is_slot(place):
            return False
        if not self.instances[place.instance].take_at(place.slot, sequence):
            return False
        self.load += 1
        return True

    def release(self, place: SlotAddress, sequence: SequenceId, spare_in: ShardId | None = None) -> None:
        """As `InstanceSlots.release`."""
        self.instances[place.instance].release(place.slot, sequence, spare_in)
        self.load -= 1

    def put_by(self, place: SlotAddress, shard: ShardId) -> None:
        """Notes that a free slot is spare, if there is such a slot."""
        if self.is_slot(place):
            self.instances[place.instance].spare[place.slot] = shard

    def withhold(self, place: SlotAddress) -> None:
        """Notes that nobody gets a free slot, if there is such a slot."""
        if self.is_slot(place) and place.slot not in self.instances[place.instance].withheld:
            self.instances[place.instance].withheld.add(place.slot)
            self.load += 1

    def recall(self, shard: ShardId) -> None:
        """The slots that are spare in a shard are free."""
        for instance in self.instances:
            instance.recall(shard)

    def withdraw(self, place: SlotAddress, shard: ShardId) -> None:
        """A slot is free, if there is such a slot that counts as spare in that shard."""
        if self.is_slot(place):
            self.instances[place.instance].withdraw(place.slot, shard)

    def holder(self, place: SlotAddress) -> SequenceId | None:
        """The sequence that holds a slot; None if nobody does, or there is no such slot."""
        return self.instances[place.instance].taken.get(place.slot) if self.is_slot(place) else None

    def spares(self) -> list[tuple[SlotAddress, ShardId]]:
        """Every spare slot, with the shard in which it is laid out."""
        return [
            (SlotAddress(self.executor, self.served.version, InstanceIndex(index), slot), shard)
            for index, instance in enumerate(self.instances)
            for slot, shard in instance.spare.items()
        ]

    def sequences(self) -> Iterator[SequenceId]:
        """Those that hold slots, of each instance in the order in which they got them."""
        return chain.from_iterable(instance.taken.values() for instance in self.instances)

    def holders(self) -> list[tuple[SlotAddress, SequenceId]]:
        """Every taken slot with its sequence, by instance and slot."""
        return [
            (SlotAddress(self.executor, self.served.version, InstanceIndex(index), slot), instance.taken[slot])
            for index, instance in enumerate(self.instances)
            for slot in sorted(instance.taken)
        ]
