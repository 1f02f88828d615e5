"""The slots of an instance, of which most are never used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.slots import InstanceSlots
from shared.contract.ids import SequenceId, SlotIndex

SIZE = 6


@given(st.lists(st.tuples(st.sampled_from(["lowest", "at", "release"]), st.integers(0, SIZE))))
def test_the_lowest_free_slot_is_given_whatever_was_taken_and_given_back(moves: list[tuple[str, int]]) -> None:
    slots = InstanceSlots(SIZE)
    free = set(range(SIZE))
    for number, (move, slot) in enumerate(moves):
        sequence = SequenceId(str(number))
        if move == "lowest" and free:
            assert min(free) == slots.take_lowest(sequence)
            free.remove(min(free))
        elif move == "at":
            assert (slot in free) == slots.take_at(SlotIndex(slot), sequence)
            free.discard(slot)
        elif move == "release" and slot in slots.taken:
            slots.release(SlotIndex(slot), slots.taken[SlotIndex(slot)])
            free.add(slot)
        assert free == slots.free()
