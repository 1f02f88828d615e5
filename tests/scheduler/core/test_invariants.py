"""What the tests of the core and the simulation lean on: a state that contradicts itself is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.core import invariants
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide
from scheduler.core.events import Assigned, ExecutorSeen, SequenceWaits
from scheduler.core.slots import OfferedVersion
from scheduler.core.state import ExecutorPhase, LeaderState, Policy
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, SlotIndex

E1, A, B, C = ExecutorId("e1"), SequenceId("a"), SequenceId("b"), SequenceId("c")


def state_with_a_b_and_c() -> LeaderState:
    """a is live, b is getting its slot, c waits."""
    state = LeaderState(Policy())
    decide(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 2),)))
    for number, name in enumerate((A, B, C)):
        decide(state, SequenceWaits(name, "1", Entry(number, 0, ShardId(0))))
    decide(state, Assigned(A, Entry(0, 0, ShardId(0)), Epoch(1)))
    invariants.check(state)
    return state


def a_forgets_its_place(state: LeaderState) -> None:
    state.sequences[A].place = None


def b_is_forgotten(state: LeaderState) -> None:
    del state.sequences[B]


def b_has_an_epoch_too_early(state: LeaderState) -> None:
    state.sequences[B].epoch = Epoch(2)


def c_is_forgotten(state: LeaderState) -> None:
    del state.sequences[C]


def c_leaves_the_backlog(state: LeaderState) -> None:
    state.backlogs["1"].withdraw(C)


def a_slot_is_spare_and_taken(state: LeaderState) -> None:
    state.ring("1").tables[E1].instances[0].spare[SlotIndex(0)] = ShardId(0)


def a_slot_is_free_and_c_waits(state: LeaderState) -> None:
    place = state.sequences[A].place
    assert place is not None
    state.move(state.sequences[A], "over", "")
    del state.sequences[A]
    state.table_at(place).release(place, A)


def the_load_is_miscounted(state: LeaderState) -> None:
    state.ring("1").tables[E1].load = 1


def one_is_said_to_yield(state: LeaderState) -> None:
    state.holders["1"].asked = 1


def c_can_be_asked_for_a_slot(state: LeaderState) -> None:
    state.holders["1"].add(C)


def a_tenant_has_a_slot_too_many(state: LeaderState) -> None:
    state.holders["1"].by_tenant["t"] = 1


def the_executor_is_lost(state: LeaderState) -> None:
    state.executors[E1].phase = ExecutorPhase.LOST


def the_executor_offers_something_else(state: LeaderState) -> None:
    state.executors[E1].versions = (OfferedVersion("1", 1, 3),)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (a_forgets_its_place, "sequences believe"),
        (b_is_forgotten, "sequences believe"),
        (b_has_an_epoch_too_early, "has epoch 2"),
        (c_is_forgotten, "nobody knows it"),
        (c_leaves_the_backlog, "the backlog disagree"),
        (a_slot_is_spare_and_taken, "instance 0: slots"),
        (a_slot_is_free_and_c_waits, "a free slot is idle"),
        (the_load_is_miscounted, "2 slots are held"),
        (one_is_said_to_yield, "0 are yielding"),
        (c_can_be_asked_for_a_slot, "2 can be asked, 1 are live"),
        (a_tenant_has_a_slot_too_many, "tenants hold"),
        (the_executor_is_lost, "e1 has slots"),
        (the_executor_offers_something_else, "e1 offers"),
    ],
)
def test_a_contradiction_is_found(corrupt: Callable[[LeaderState], None], complaint: str) -> None:
    state = state_with_a_b_and_c()
    corrupt(state)

    with pytest.raises(invariants.BrokenInvariantError, match=complaint):
        invariants.check(state)
