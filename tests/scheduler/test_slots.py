"""The slots of an instance, of which most are never used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.history import IllegalMoveError
from scheduler.core.slots import InstanceSlots, OfferedVersion, SlotTable
from shared.contract.ids import ExecutorId, SequenceId, ShardId, SlotIndex

SIZE = 6


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lowest", "at", "release", "lay out", "spare again", "recall"]), st.integers(0, SIZE)
        )
    )
)
def test_the_lowest_free_slot_is_given_whatever_was_taken_and_given_back(moves: list[tuple[str, int]]) -> None:
    slots = InstanceSlots(SIZE)
    free, spare = set(range(SIZE)), set[int]()
    for number, (move, slot) in enumerate(moves):
        sequence = SequenceId(str(number))
        if move == "lowest" and free:
            assert min(free) == slots.take_lowest(sequence)
            free.remove(min(free))
        elif move == "at":
            assert (slot in free | spare) == slots.take_at(SlotIndex(slot), sequence)
            free.discard(slot)
            spare.discard(slot)
        elif move == "lay out" and free:
            assert min(free) == slots.lay_out_lowest(ShardId(0))
            free.remove(min(free))
            spare.add(min(slots.spare.keys() - spare))
        elif move == "recall":
            slots.recall(ShardId(0))
            free |= spare
            spare.clear()
        elif move in ("release", "spare again") and slot in slots.taken:
            slots.release(SlotIndex(slot), slots.taken[SlotIndex(slot)], ShardId(0) if move == "spare again" else None)
            (spare if move == "spare again" else free).add(slot)
        assert (free, spare) == (slots.free(), set(slots.spare))


def test_a_slot_that_is_spare_again_and_again_takes_no_memory() -> None:
    slots = InstanceSlots(SIZE)
    slot = slots.lay_out_lowest(ShardId(0))

    for number in range(100):
        assert slots.take_at(slot, SequenceId(str(number)))
        slots.release(slot, SequenceId(str(number)), ShardId(0))

    assert [] == slots._given_back
    slots.recall(ShardId(0))
    assert slot in slots.free()


@pytest.mark.parametrize("served", [OfferedVersion("1", 1, 2), OfferedVersion("1", 1, 3, closing=True)])
def test_a_slot_that_may_be_another_sequence_s_is_not_given(served: OfferedVersion) -> None:
    """One slot is taken and one is spare."""
    table = SlotTable(ExecutorId("e1"), OfferedVersion("1", 1, served.slots))
    place = table.take(SequenceId("a"))
    table.lay_out(1, ShardId(0))
    table.served = served

    with pytest.raises(IllegalMoveError, match="e1 has no free slot of version 1: 'b'"):
        table.take(SequenceId("b"))
    with pytest.raises(IllegalMoveError, match="slot 0 is held by 'a': 'b' cannot give it back"):
        table.release(place, SequenceId("b"))


def test_a_slot_left_behind_in_any_instance_is_a_gap() -> None:
    table = SlotTable(ExecutorId("e1"), OfferedVersion("1", 2, 2))
    places = [table.take(SequenceId(name)) for name in "abc"]
    table.lay_out(1, ShardId(0))
    assert not table.has_gap

    table.release(places[0], SequenceId("a"))
    table.release(places[1], SequenceId("b"))
    assert table.has_gap
