"""Shards that are away: nobody gets a slot that one of their sequences may hold."""

from __future__ import annotations

from scheduler.core.actions import Action, Assign, LayOut, MoveOut, Recall
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide
from scheduler.core.events import (
    Assigned,
    Event,
    ExecutorLost,
    ExecutorSeen,
    SequenceFound,
    SequenceWaits,
    SpareTaken,
    Tick,
)
from scheduler.core.invariants import check
from scheduler.core.slots import OfferedVersion, SlotAddress
from scheduler.core.state import LeaderState, Policy
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex, first_shards, shard_of

E1, E2 = ExecutorId("e1"), ExecutorId("e2")
HERE, AWAY = first_shards(2)
POLICY = Policy(spare_slots=2, shards=(HERE, AWAY))


def take(state: LeaderState, *events: Event) -> list[Action]:
    """What is left to be done after these."""
    actions = [action for event in events for action in decide(state, event)]
    check(state)
    return actions


def named(shard: ShardId, number: int) -> SequenceId:
    """The number-th name of a sequence of a shard."""
    names = (SequenceId(f"s{index}") for index in range(1000))
    return [name for name in names if shard_of(name, POLICY.shards) == shard][number]


def place(slot: int, executor: ExecutorId = E1, version: str = "1") -> SlotAddress:
    return SlotAddress(executor, version, InstanceIndex(0), SlotIndex(slot))


def offers(executor: ExecutorId, slots: int, *versions: str) -> ExecutorSeen:
    return ExecutorSeen(executor, tuple(OfferedVersion(version, 1, slots) for version in versions or ("1",)))


def waits(sequence: SequenceId, number: int, version: str = "1") -> SequenceWaits:
    return SequenceWaits(sequence, version, Entry(number, 0, HERE))


def placed(actions: list[Action]) -> list[int]:
    return [action.place.slot for action in actions if isinstance(action, Assign)]


def without(*places: SlotAddress) -> LeaderState:
    """Of a leader without the shard AWAY, whose sequences may hold these slots."""
    return LeaderState(POLICY, withheld={AWAY: frozenset(places)})


def test_slots_that_may_be_held_are_given_to_nobody_and_those_found_held_are() -> None:
    state = without(place(0), place(2))
    take(state, offers(E1, 4), SequenceFound(named(HERE, 0), place(1), Epoch(1)))

    assert [3] == placed(take(state, waits(named(HERE, 1), 1)))
    assert [] == take(state, waits(named(HERE, 2), 2)), "all slots are held, and nothing can be recalled"


def test_slots_that_may_be_held_may_be_gone() -> None:
    """Their executor has come back with fewer."""
    state = without(place(1), place(4), SlotAddress(E1, "1", InstanceIndex(1), SlotIndex(0)))

    take(state, offers(E1, 2))

    assert [0] == placed(take(state, waits(named(HERE, 0), 1)))


def test_spare_slots_are_laid_out_and_recalled_in_the_shards_that_are_there() -> None:
    state, first = without(place(0)), named(HERE, 0)
    take(state, offers(E1, 5), waits(first, 1), Assigned(first, Entry(1, 0, HERE), Epoch(1)))

    laid_out = [action for action in take(state, Tick(1000)) if isinstance(action, LayOut)]
    taken = SpareTaken(named(HERE, 1), place(2), Epoch(2), taken_ms=1000)
    after = take(state, taken, waits(named(HERE, 2), 2), waits(named(HERE, 3), 3))

    assert [(HERE, ((0, 2), (0, 3)))] == [(action.shard, action.slots) for action in laid_out]
    assert [4] == placed(after)
    assert [Recall(E1)] == [action for action in after if isinstance(action, Recall)]
    assert [HERE] == list(state.executors[E1].recalls)


def test_slots_stay_withheld_when_an_executor_offers_other_versions_and_the_same_again() -> None:
    state = without(place(0))
    take(state, offers(E1, 2), offers(E1, 2, "2"))
    assert [0] == placed(take(state, waits(named(HERE, 0), 1, "2")))

    take(state, offers(E1, 2, "1", "2"))

    assert [1] == placed(take(state, waits(named(HERE, 1), 2)))
    take(state, ExecutorLost(E1), offers(E2, 2))
    assert [0] == placed(take(state, waits(named(HERE, 2), 3))), "those of another executor are free"


def test_load_is_levelled_with_what_others_may_hold() -> None:
    """No sequence is moved to an executor whose free slots others may hold: it would come back at once."""
    state = without(*(place(slot, E2) for slot in range(4)))
    held = [SequenceFound(named(HERE, slot), place(slot), Epoch(slot + 1)) for slot in range(4)]
    take(state, offers(E1, 4), offers(E2, 4), *held, Tick(0))

    assert [] == [action for action in take(state, Tick(5000), Tick(10_000)) if isinstance(action, MoveOut)]


def test_instances_are_filled_evenly_with_what_others_may_hold() -> None:
    state = without(place(0))
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 2, 1),)))

    (action,) = take(state, waits(named(HERE, 0), 1))

    assert isinstance(action, Assign)
    assert 1 == action.place.instance
