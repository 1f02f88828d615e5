"""Spare slots: in several shards, each of which has its own feed, and whether they are all that sequences need."""

from __future__ import annotations

import pytest

from scheduler.core.actions import Action, Assign, LayOut, Recall, Reclaim
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide
from scheduler.core.events import (
    Assigned,
    Event,
    ExecutorLost,
    ExecutorSeen,
    RecallSent,
    SequenceOver,
    SequenceWaits,
    SparesRecalled,
    SpareTaken,
    Tick,
)
from scheduler.core.invariants import check
from scheduler.core.slots import OfferedVersion, SlotAddress
from scheduler.core.spares import has_spares_only
from scheduler.core.state import LeaderState, Policy
from scheduler.ingest import Source, StreamEntry, StreamKind, over
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex, first_shards, shard_of

E1 = ExecutorId("e1")
ONE, TWO = ShardId(0), ShardId(1)


def take(state: LeaderState, *events: Event) -> list[Action]:
    """What is left to be done after the last of these."""
    return [decide(state, event) for event in events][-1]


def waits(name: str, number: int) -> SequenceWaits:
    return SequenceWaits(SequenceId(name), "1", Entry(number, 0, ONE))


def placed(actions: list[Action]) -> list[str]:
    return [action.sequence for action in actions if isinstance(action, Assign)]


def test_no_slot_is_given_before_its_own_shard_has_told_who_took_some() -> None:
    state = LeaderState(Policy(spare_slots=4, shards=first_shards(2)))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 5),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)))
    laid_out = [action for action in take(state, Tick(1000)) if isinstance(action, LayOut)]
    assert [(ONE, 2), (TWO, 2)] == [(action.shard, len(action.slots)) for action in laid_out]
    assert [Recall(E1)] == take(state, waits("b", 2))

    # The number of a recall is known when it was sent, and is another one in each shard.
    assert [] == take(state, SparesRecalled(E1, ONE, 0), RecallSent(E1, ONE, 7), RecallSent(E1, TWO, 3))
    assert [] == take(state, SparesRecalled(E1, ONE, 3))
    assert ["b"] == placed(take(state, SparesRecalled(E1, ONE, 7))), "whoever waits need not wait for the other shard"
    assert ["c"] == placed(take(state, waits("c", 3)))
    assert [] == take(state, waits("d", 4))

    assert ["d"] == placed(take(state, SparesRecalled(E1, TWO, 3)))
    assert [] == take(state, SparesRecalled(E1, TWO, 3))


def test_spare_slots_are_all_that_sequences_need_while_nobody_waits_and_none_is_recalled_or_underway() -> None:
    state = LeaderState(Policy(spare_slots=4))
    take(state, ExecutorSeen(ExecutorId("e2"), (OfferedVersion("2", 1, 5),)))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 3),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)))
    assert not has_spares_only(state), "none is laid out yet"
    take(state, Tick(1000))
    assert has_spares_only(state)

    state.underway[SequenceId("a")] = ("1", 1000)
    assert not has_spares_only(state)
    state.underway.clear()
    state.backlogs["2"].add(SequenceId("b"), Entry(2, 0, ONE), moving=False)
    assert not has_spares_only(state)
    state.backlogs["2"].withdraw(SequenceId("b"))
    assert has_spares_only(state)

    assert [Recall(E1)] == take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 4),)))
    assert not has_spares_only(state)


def test_a_sequence_that_was_moved_out_and_has_taken_a_spare_slot_is_underway_no_more() -> None:
    state = LeaderState(Policy(spare_slots=4))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 2),)))
    state.underway[SequenceId("a")] = ("1", 0)

    take(state, SpareTaken(SequenceId("a"), SlotAddress(E1, "1", InstanceIndex(0), SlotIndex(0)), Epoch(2)))

    assert not state.underway


def test_the_time_in_which_a_spare_slot_is_the_last_one_taken_counts_for_the_forecast() -> None:
    state = LeaderState(Policy(spare_slots=4))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 2),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)), Tick(1000))
    assert 0 == state.freed["1"].seen(1500)[0]

    place = SlotAddress(E1, "1", InstanceIndex(0), SlotIndex(1))
    assert [] == take(state, SpareTaken(SequenceId("b"), place, Epoch(2)))

    assert 500 == state.freed["1"].seen(1500)[0]


def test_a_slot_is_not_given_to_others_that_a_sequence_has_taken_whose_wait_ended_unheard() -> None:
    """Its record could not be read, or the feed was long when its caller left; then it began anew in a spare slot."""
    state = LeaderState(Policy(spare_slots=4))
    e2 = ExecutorId("e2")
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 1),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)))
    laid_out = take(state, ExecutorSeen(e2, (OfferedVersion("1", 1, 1),)), Tick(1000))
    assert [e2] == [action.executor for action in laid_out if isinstance(action, LayOut)]
    assert [Recall(e2)] == take(state, waits("b", 2000))

    # As `seat` in submit.lua writes it.
    fields = {b"k": b"t", b"q": b"b", b"n": b"2", b"x": b"e2", b"v": b"1", b"i": b"0", b"l": b"0", b"o": b""}
    taken = over(StreamEntry(Source(StreamKind.FEED, ONE), b"2001-0", fields))
    take(state, taken, RecallSent(e2, ONE, 7), SparesRecalled(e2, ONE, 7))
    # Where it was given a slot, Redis says that it does not wait.
    take(state, Assigned(SequenceId("b"), Entry(2000, 0, ONE), Epoch(0)))

    assert [] == placed(take(state, waits("c", 3000)))
    check(state)


@pytest.mark.parametrize(("slot", "taken"), [(0, ("a", "b")), (9, ("b",))], ids=["another has it", "there is none"])
def test_a_slot_that_was_never_spare_costs_its_executor_no_other_sequence(slot: int, taken: tuple[str, ...]) -> None:
    """An entry was changed by hand, or the slots are fewer by now. Of all that the executor has, what only it holds
    would be lost."""
    state = LeaderState(Policy())
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 2),)), waits("a", 1), waits("c", 2))
    for number, name in enumerate(("a", "c"), 1):
        take(state, Assigned(SequenceId(name), Entry(number, 0, ONE), Epoch(number)))
    take(state, waits("d", 3))

    place = SlotAddress(E1, "1", InstanceIndex(0), SlotIndex(slot))
    actions = take(state, SpareTaken(SequenceId("b"), place, Epoch(4), cause="feed"))

    assert Reclaim(E1, "feed", taken) == actions[0]
    assert ["d"] * (len(taken) - 1) == placed(actions[1:]), "who waits gets the slot behind them"
    assert "c" in state.sequences
    check(state)


def test_a_slot_is_given_to_others_that_was_believed_spare_as_soon_as_the_feed_tells_how_its_sequence_ended() -> None:
    """The leader has heard of the next life of the id first."""
    state = LeaderState(Policy(spare_slots=2))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 3),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)), Tick(1000))
    assert [Recall(E1)] == take(state, waits("a", 2000))

    assert ["a"] == placed(take(state, SequenceOver(SequenceId("a"), Epoch(1))))
    check(state)

    # Told again, it frees nothing.
    assert [] == take(state, SequenceOver(SequenceId("a"), Epoch(1)))


@pytest.mark.parametrize(
    "events", [(RecallSent(E1, ONE, 7), SparesRecalled(E1, ONE, 7)), (ExecutorLost(E1),)], ids=["recalled", "lost"]
)
def test_an_end_is_not_waited_for_whose_slot_is_spare_no_more(events: tuple[Event, ...]) -> None:
    state = LeaderState(Policy(spare_slots=2))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 3),)), waits("a", 1))
    take(state, Assigned(SequenceId("a"), Entry(1, 0, ONE), Epoch(1)), Tick(1000), waits("a", 2000))
    assert state.superseded

    take(state, *events)

    assert not state.superseded


def test_the_slot_of_an_earlier_life_is_free_where_its_shard_has_no_spare_ones_any_more() -> None:
    """Also while it is still to be read in another shard that spare slots were recalled."""
    state = LeaderState(Policy(spare_slots=2, shards=first_shards(2)))
    name = next(name for name in map(str, range(64)) if shard_of(SequenceId(name), state.shards) == ONE)
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 3),)), waits(name, 1))
    take(state, Assigned(SequenceId(name), Entry(1, 0, ONE), Epoch(1)), Tick(1000))
    take(state, waits("b", 2), RecallSent(E1, ONE, 7), RecallSent(E1, TWO, 3))
    assert ["b"] == placed(take(state, SparesRecalled(E1, ONE, 7)))

    assert [name] == placed(take(state, waits(name, 3)))
    check(state)


def test_the_slot_of_an_earlier_life_may_be_gone_when_the_feed_tells_how_that_ended() -> None:
    """Its executor has fewer instances since."""
    state = LeaderState(Policy(spare_slots=2))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 2, 2),)), waits("b", 1), waits("a", 2))
    take(state, *(Assigned(SequenceId(name), Entry(at, 0, ONE), Epoch(at)) for at, name in ((1, "b"), (2, "a"))))
    take(state, Tick(1000), waits("a", 2000), ExecutorSeen(E1, (OfferedVersion("1", 1, 2),)))
    assert (SequenceId("a"), Epoch(2)) in state.superseded

    take(state, SequenceOver(SequenceId("a"), Epoch(2)))

    check(state)
