"""Turns in a line: those of tenants, and that nothing of sequences that have left it piles up."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import expiry
from scheduler.core.actions import Assign
from scheduler.core.backlog import COMPACT_SLACK, MOVING_RANK, NO_TURNS, Backlog, BacklogEntry, Entry, Turns
from scheduler.core.decide import decide, is_due
from scheduler.core.events import (
    Assigned,
    ExecutorSeen,
    PatienceLowered,
    SequenceOver,
    SequenceWaits,
    SharesSeen,
    WaitEnded,
)
from scheduler.core.slots import OfferedVersion
from scheduler.core.state import LeaderState, Policy
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId
from shared.contract.tenants import EVERY_OTHER, TenantLimits, Tenants

STAYING = 5
LEAVING = 10 * COMPACT_SLACK


def entry(number: int) -> Entry:
    return Entry(number, 0, ShardId(0))


def test_a_line_does_not_grow_with_those_who_leave_it_from_the_middle() -> None:
    """Whoever is first stays, so nobody comes up."""
    backlog = Backlog()
    for number in range(STAYING):
        backlog.add(SequenceId(f"stays {number}"), entry(number), moving=False)
    for number in range(LEAVING):
        backlog.add(SequenceId(f"leaves {number}"), entry(STAYING + number), moving=False)
        backlog.withdraw(SequenceId(f"leaves {number}"))
        assert backlog._size <= 2 * STAYING + COMPACT_SLACK + 1
    backlog.add(SequenceId("moves"), entry(STAYING + LEAVING), moving=True)

    turns = ["moves", *(f"stays {number}" for number in range(STAYING))]
    assert turns == [waiting.sequence for waiting in backlog.in_order()]
    assert BacklogEntry(MOVING_RANK, entry(STAYING + LEAVING), SequenceId("moves")) == backlog.in_order()[0]
    taken: list[str] = []
    for first in backlog.in_turn(NO_TURNS):
        taken.append(first)
        backlog.withdraw(first)
    assert turns == taken
    assert 0 == backlog._size


def test_turns_that_may_come_sooner_do_not_pile_up() -> None:
    """As slots of tenants that wait become free, and others get them."""
    backlog = Backlog()
    for number in range(STAYING):
        backlog.add(SequenceId(str(number)), entry(number), moving=False, tenant=str(number))
    for number in range(LEAVING):
        backlog.reconsider(str(number % STAYING))
        assert len(backlog._heads) <= 2 * STAYING + COMPACT_SLACK


def test_deadlines_of_those_who_wait_no_longer_do_not_pile_up() -> None:
    """And the others stay in order: whoever waits is refused in time, whoever has left between them."""
    state, chance = LeaderState(Policy(1.25)), random.Random(7)
    due_ms = {f"stays {number}": chance.randrange(1000) for number in range(10 * STAYING)}
    for number, name in enumerate(due_ms):
        decide(state, SequenceWaits(SequenceId(name), "1", entry(number)))
        expiry.watch(state, SequenceId(name), entry(number), due_ms[name])
    for number in range(LEAVING):
        expiry.watch(state, SequenceId(f"left {number}"), entry(number), chance.randrange(1000))
        assert len(state.timeouts) <= 20 * STAYING + COMPACT_SLACK + 1

    state.now_ms = 1000
    assert sorted(due_ms, key=lambda name: due_ms[name]) == expiry.overdue(state)
    assert [] == state.timeouts


def test_deadlines_of_one_sequence_do_not_pile_up_and_the_earliest_counts() -> None:
    """A client may give each further step of a waiting sequence less time than the one before."""
    state = LeaderState(now_ms=0)
    for number in range(STAYING):
        decide(state, SequenceWaits(SequenceId(str(number)), "1", entry(number)))
    for due_ms in reversed(range(1, LEAVING)):
        for number in range(STAYING):
            decide(state, PatienceLowered(SequenceId(str(number)), entry(number), due_ms))
        assert len(state.timeouts) <= 2 * STAYING + COMPACT_SLACK + 1

    assert [] == expiry.overdue(state)
    state.now_ms = 1
    assert [str(number) for number in range(STAYING)] == expiry.overdue(state)


def test_it_is_not_looked_for_whose_turn_it_is_while_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes the longer, the more tenants wait, and a client may name another one with each of its sequences."""
    state = LeaderState()
    decide(state, ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, 1),)))
    asked = count_tenants_compared(monkeypatch)
    for number in range(STAYING):
        name = str(number)
        decide(state, SequenceWaits(SequenceId(name), "1", entry(number), tenant=name))
    decide(state, Assigned(SequenceId("0"), entry(0), Epoch(1)))
    assert {"0"} == set(asked)
    asked.clear()
    decide(state, SequenceOver(SequenceId("0"), Epoch(1)))

    assert {"1", "2", "3", "4"} == set(asked)


def test_the_tenants_are_compared_once_however_many_slots_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a leader would be busy for seconds when an executor joins and thousands of tenants wait."""
    state, tenants = LeaderState(), 100
    for number in range(2 * tenants):
        waits = SequenceWaits(SequenceId(str(number)), "1", entry(number), tenant=str(number % tenants))
        decide(state, waits)
    asked = count_tenants_compared(monkeypatch)

    actions = decide(state, ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, 2 * tenants),)))

    assert 2 * tenants == len(actions)
    assert len(asked) <= 3 * len(actions)


def test_all_tenants_are_not_compared_for_each_slot_that_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a leader would give a few hundred slots a second and do nothing else, where thousands of tenants wait."""
    state, tenants = LeaderState(), 200
    decide(state, ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, 1),)))
    for number in range(tenants):
        decide(state, SequenceWaits(SequenceId(str(number)), "1", entry(number), tenant=str(number)))
    given = [SequenceId("0")]
    asked = count_tenants_compared(monkeypatch)
    for number in range(tenants // 2):
        decide(state, Assigned(given[-1], entry(number), Epoch(number + 1)))
        (assign,) = decide(state, SequenceOver(given[-1], Epoch(number + 1)))
        assert isinstance(assign, Assign)
        given.append(assign.sequence)

    assert [str(number) for number in range(tenants // 2 + 1)] == given
    assert len(asked) <= 4 * tenants


def count_tenants_compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants of whom it was asked how many slots they have for their share, from here on."""
    asked: list[str] = []
    after = Turns.after

    def counted(turns: Turns, tenant: str) -> float:
        asked.append(tenant)
        return after(turns, tenant)

    monkeypatch.setattr(Turns, "after", counted)
    return asked


def test_a_tick_is_due_as_long_as_a_sequence_of_any_version_waits_or_is_underway() -> None:
    state = LeaderState(now_ms=1000, look_ms=5000)
    for version in ("1", "2"):
        decide(state, SequenceWaits(SequenceId(version), version, entry(1)))
    assert is_due(state, 1000)
    decide(state, WaitEnded(SequenceId("1"), entry(1)))
    assert is_due(state, 1000)

    decide(state, WaitEnded(SequenceId("2"), entry(1)))

    assert not is_due(state, 1000)
    assert is_due(state, 999), "the clock of Redis was set back"
    state.underway[SequenceId("1")] = ("1", 1000)
    assert is_due(state, 1000)
    state.underway.clear()
    state.uneven_since_ms["1"] = 1000
    assert is_due(state, 1000)


# -- tenants ---------------------------------------------------------------------------------------------------------

TENANTS = ("", "acme", "blue", "corp")
WAITING = st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=24)
SLOTS = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 9))
SHARES = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 5))


def filled(waiting: list[tuple[str, bool]]) -> Backlog:
    """A backlog of sequences, each of a tenant and moving or not, named by their number."""
    backlog = Backlog()
    for number, (tenant, moving) in enumerate(waiting):
        backlog.add(SequenceId(str(number)), entry(number), moving=moving, tenant=tenant)
    return backlog


def served(backlog: Backlog, turns: Turns) -> list[str]:
    """The sequences in the order in which they get slots, one after the other."""
    slots, taken = Counter(turns.slots), list[str]()
    tenants = {waiting.sequence: waiting.tenant for waiting in backlog.in_order()}
    for first in backlog.in_turn(Turns(slots, turns.shares)):
        backlog.withdraw(first)
        slots[tenants[first]] += 1
        taken.append(first)
    return taken


@given(WAITING, SLOTS, SHARES)
def test_the_line_that_is_told_is_the_line_that_is_served(
    waiting: list[tuple[str, bool]], slots: dict[str, int], shares: dict[str, int]
) -> None:
    turns = Turns(slots, shares)
    told = [each.sequence for each in filled(waiting).in_order(turns)]

    assert told == served(filled(waiting), turns)
    assert sorted(told) == sorted(str(number) for number in range(len(waiting)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waits", "waits", "moves", "is served", "has a slot less", "leaves", "shares"]),
            st.sampled_from(TENANTS),
            st.integers(0, 99),
        ),
        max_size=60,
    )
)
def test_the_next_in_turn_is_the_one_whom_a_comparison_of_all_would_find(moves: list[tuple[str, str, int]]) -> None:
    """Whatever has become of slots and shares meanwhile."""
    backlog, slots, shares, waiting = Backlog(), Counter[str](), dict[str, int](), dict[SequenceId, BacklogEntry]()
    turns = Turns(slots, shares)
    for number, (move, tenant, drawn) in enumerate(moves):
        in_turn = sorted(waiting.values(), key=lambda one: (one.rank, one.rank and turns.after(one.tenant), one))
        first = in_turn[0] if in_turn else None
        if move in ("waits", "moves"):
            new = BacklogEntry(int(move == "waits"), Entry(drawn, number, ShardId(0)), SequenceId(str(number)), tenant)
            waiting[new.sequence] = new
            backlog.add(new.sequence, new.entry, moving=move == "moves", tenant=tenant)
        elif move == "is served":
            assert (first.sequence if first else None) == next(backlog.in_turn(turns), None)
            if first is not None:
                backlog.withdraw(first.sequence)
                slots[first.tenant] += 1
                del waiting[first.sequence]
        elif move == "has a slot less" and slots[tenant]:
            slots[tenant] -= 1
            backlog.reconsider(tenant)
        elif move == "leaves" and waiting:
            gone = list(waiting)[drawn % len(waiting)]
            backlog.withdraw(gone)
            del waiting[gone]
        elif move == "shares":
            shares[tenant] = 1 + drawn % 5
            backlog.reconsider_all()


@given(WAITING)
def test_without_tenants_and_shares_moving_sequences_come_first_and_then_the_older(
    waiting: list[tuple[str, bool]],
) -> None:
    line = [("", moving) for _, moving in waiting]

    expected = sorted(range(len(line)), key=lambda number: (not line[number][1], number))
    assert [str(number) for number in expected] == served(filled(line), NO_TURNS)


@given(WAITING, SHARES, st.integers(1, 12))
def test_no_tenant_that_waits_has_a_slot_less_than_its_share(
    waiting: list[tuple[str, bool]], shares: dict[str, int], free: int
) -> None:
    """With the slot that it lacks it would have more for its share than every other tenant has now."""
    line = [(tenant, False) for tenant, _ in waiting]
    order = served(filled(line), Turns({}, shares))
    slots = Counter(line[int(sequence)][0] for sequence in order[:free])
    left = {line[int(sequence)][0] for sequence in order[free:]}

    for waits in left:
        for other, has in slots.items():
            assert has / shares.get(other, 1) <= (slots[waits] + 1) / shares.get(waits, 1)


def test_of_a_tenant_the_older_sequence_comes_first_and_shares_weigh() -> None:
    waiting = [("acme", False)] * 6 + [("blue", False)] * 6

    assert ["0", "1", "6", "2", "3", "7", "4", "5", "8", "9", "10", "11"] == served(
        filled(waiting), Turns({}, {"acme": 2})
    )
    assert ["6", "7", "0", "8", "1", "9", "2", "10", "3", "11", "4", "5"] == served(
        filled(waiting), Turns({"acme": 2}, {})
    )


def test_a_share_of_every_other_tenant_is_one_of_each_that_has_none_of_its_own() -> None:
    tenants = Tenants({"acme": TenantLimits(), EVERY_OTHER: TenantLimits(share=2)})

    for other in ("acme", ""):
        waiting = [(other, False)] * 3 + [("blue", False)] * 4
        assert ["3", "0", "4", "5", "1", "6", "2"] == served(filled(waiting), Turns({}, tenants.shares))


class Line:
    """The line of one executor with so many slots, as the core keeps it. Sequences are named by tenant and age."""

    def __init__(self, slots: int) -> None:
        self.state = LeaderState()
        decide(self.state, ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, slots),)))

    def waits(self, *names: str) -> list[str]:
        """They begin to wait. Those that have slots by now."""
        return [
            given
            for name in names
            for given in self.given(
                SequenceWaits(SequenceId(name), "1", entry(int(name.split()[1])), tenant=name.split()[0])
            )
        ]

    def ends(self, name: str) -> list[str]:
        """One that has a slot is over. Those that have got one."""
        return self.given(SequenceOver(SequenceId(name), Epoch(1)))

    def given(self, event: SequenceWaits | SequenceOver) -> list[str]:
        given = [action for action in decide(self.state, event) if isinstance(action, Assign)]
        for assign in given:
            decide(self.state, Assigned(assign.sequence, assign.entry, Epoch(1)))
        return [assign.sequence for assign in given]


def test_a_tenant_whose_slots_have_become_free_is_next_though_it_was_found_to_be_later() -> None:
    line = Line(slots=3)
    line.waits("acme 0", "acme 1", "blue 2", "acme 3", "blue 4", "blue 5")
    assert ["acme 3"] == line.ends("acme 0")
    assert [] == line.waits("blue 7", "acme 9")
    assert ["blue 4"] == line.ends("blue 2"), "acme has two, and would have three"
    assert ["blue 5"] == line.ends("acme 1")

    assert ["acme 9"] == line.ends("acme 3")


def test_a_tenant_whose_share_has_grown_is_next_though_it_was_found_to_be_later() -> None:
    line = Line(slots=2)
    line.waits("acme 0", "blue 1", "blue 3", "acme 5", "blue 6")
    assert ["blue 3"] == line.ends("blue 1"), "acme has one, and would have two"

    decide(line.state, SharesSeen({"acme": 4}))

    assert ["acme 5"] == line.ends("blue 3")


def test_the_shares_that_an_operator_sets_decide_from_then_on_and_a_tenant_without_slots_leaves_nothing() -> None:
    state = LeaderState()
    decide(state, ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, 3),)))
    for number, tenant in enumerate(("acme", "acme", "blue", "blue", "acme")):
        waits = SequenceWaits(SequenceId(str(number)), "1", entry(number), tenant=tenant)
        for action in decide(state, waits):
            assert isinstance(action, Assign)
            decide(state, Assigned(action.sequence, action.entry, Epoch(1)))

    decide(state, SharesSeen({"acme": 4}))

    (assign,) = decide(state, SequenceOver(SequenceId("2"), Epoch(1)))
    assert isinstance(assign, Assign)
    assert "4" == assign.sequence
    assert {"acme": 3} == dict(state.holders["1"].by_tenant)
