"""Load becomes even, and nothing is moved for it that need not be."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import balance, invariants
from scheduler.core.actions import Action, Assign, Dismiss, MoveOut
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide
from scheduler.core.events import Assigned, Event, ExecutorSeen, MovedOut, SequenceOver, SequenceWaits, Tick
from scheduler.core.placement import Ring
from scheduler.core.slots import OfferedVersion, SlotTable
from scheduler.core.state import NO_EPOCH, LeaderState, Policy, Wish
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId

TICK_MS = 500


class World:
    """Sequences on executors, one leader; a sequence has a step in flight with some likelihood when it is asked for."""

    def __init__(self, chance: random.Random, *, busy: float = 0.0) -> None:
        self.state = LeaderState(Policy(1.25))
        self.chance = chance
        self.busy = busy
        self.moved: Counter[SequenceId] = Counter()
        self.clock = 0

    def join(self, name: str, slots: int = 512) -> None:
        self.tell(ExecutorSeen(ExecutorId(name), (OfferedVersion("1", 1, slots),)))

    def start(self, count: int) -> None:
        for number in range(count):
            self.waits(SequenceId(f"q{number}"), moving=False)

    def waits(self, sequence: SequenceId, *, moving: bool) -> None:
        self.clock += 1
        self.tell(SequenceWaits(sequence, "1", Entry(self.clock, 0, ShardId(0)), moving=moving))

    def run(self, seconds: int) -> None:
        for _ in range(seconds * 1000 // TICK_MS):
            self.tell(Tick(self.state.now_ms + TICK_MS))
        invariants.check(self.state)

    def tell(self, event: Event) -> None:
        events = [event]
        while events:
            actions = [action for event in events for action in decide(self.state, event)]
            events = [outcome for action in actions for outcome in self.perform(action)]

    def perform(self, action: Action) -> list[Event]:
        self.clock += 1
        match action:
            case Assign(sequence, _, entry):
                return [Assigned(sequence, entry, Epoch(self.clock))]
            case MoveOut(sequence, epoch) if self.chance.random() < self.busy:
                return [MovedOut(sequence, epoch, is_taken=False)]
            case MoveOut(sequence, epoch):
                self.moved[sequence] += 1
                back = SequenceWaits(sequence, "1", Entry(self.clock, 0, ShardId(0)), moving=True)
                return [MovedOut(sequence, epoch, is_taken=True), back]
            case _:
                return []

    @property
    def loads(self) -> list[int]:
        return sorted(self.state.ring("1").loads().values())


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(1, 5),
    joining=st.integers(1, 4),
    count=st.integers(0, 120),
    busy=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 1 << 30),
)
def test_load_is_within_the_bound_after_executors_joined_and_no_move_was_needless(
    before: int, joining: int, count: int, busy: float, seed: int
) -> None:
    world = World(random.Random(seed), busy=busy)
    for number in range(before):
        world.join(f"e{number}")
    world.start(count)
    for number in range(before, before + joining):
        world.join(f"e{number}")
    mean = count / (before + joining)
    share = max(math.ceil(mean), math.floor(1.25 * mean))
    needed = sum(max(0, load - share) for load in world.loads)

    world.run(seconds=2)
    for _ in range(1000):
        if max(world.loads) <= share:
            break
        world.run(seconds=10)

    assert max(world.loads) <= share
    assert needed == world.moved.total()
    assert set(world.moved.values()) <= {1}


@pytest.mark.parametrize("joining", [1, 2, 4])
def test_fewer_are_moved_than_if_everybody_were_placed_anew(joining: int) -> None:
    """The rival: consistent hashing with bounded loads as if the new executors had been there from the beginning."""
    world = World(random.Random(1))
    for number in range(4):
        world.join(f"e{number}")
    world.start(400)
    before = {name: one.place.executor for name, one in world.state.sequences.items() if one.place}
    for number in range(4, 4 + joining):
        world.join(f"e{number}")
    world.run(seconds=60)

    rival = Ring(1.25, 64)
    for number in range(4 + joining):
        rival.put(SlotTable(ExecutorId(f"e{number}"), OfferedVersion("1", 1, 512)))
    elsewhere = 0
    for sequence, executor in before.items():
        table = rival.choose(sequence)
        table.take(sequence)
        elsewhere += table.executor != executor

    assert 0 < world.moved.total() < 0.8 * elsewhere or (joining == 1 and world.moved.total() < elsewhere)
    assert max(world.loads) <= 1.25 * 400 / (4 + joining)


def test_what_a_look_at_uneven_load_costs_does_not_grow_with_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(random.Random(1))
    world.join("e0", slots=4 * balance.LOOKED_AT_MAX)
    world.start(4 * balance.LOOKED_AT_MAX)
    world.join("e1", slots=4 * balance.LOOKED_AT_MAX)
    looked_at: list[SequenceId] = []

    def told(_ring: Ring, sequence: SequenceId) -> ExecutorId:
        looked_at.append(sequence)
        return ExecutorId("e0")

    monkeypatch.setattr(Ring, "prefers", told)
    for now_ms in (0, balance.UNEVEN_MS):
        world.tell(Tick(now_ms))

    assert balance.LOOKED_AT_MAX == len(looked_at)
    assert balance.MOVES_MAX == world.moved.total()


def test_a_sequence_that_comes_counts_for_the_share_of_an_executor() -> None:
    """So it goes where it belongs, as long as that stays within the load factor with it."""
    ring = Ring(1.0, 64)
    for name, sequences in (("e0", 2), ("e1", 1), ("e2", 0)):
        ring.put(table := SlotTable(ExecutorId(name), OfferedVersion("1", 1, 8)))
        for number in range(sequences):
            table.take(SequenceId(f"{name} {number}"))
    name = next(name for number in range(99) if ring.prefers(name := SequenceId(f"q{number}")) == "e1")

    assert ring.tables[ExecutorId("e1")] is ring.choose(name)


def test_a_wish_beyond_those_that_are_pursued_is_dismissed_and_so_is_one_that_a_later_one_replaces() -> None:
    state = LeaderState()
    for number in range(balance.WISHES_MAX):
        state.wishes[SequenceId(f"q{number}")] = Wish(Entry(number, 0, ShardId(0)), ExecutorId("e9"), 1000)
    new = Entry(5000, 0, ShardId(0))
    state.underway[SequenceId("q")] = ("1", 0)

    assert [Dismiss(SequenceId("q"), new)] == balance.wish(state, SequenceId("q"), None, new, "")
    replaced = Dismiss(SequenceId("q7"), Entry(7, 0, ShardId(0)))
    # Nobody knows e9: the later wish is dismissed too.
    assert [replaced, Dismiss(SequenceId("q7"), new)] == balance.wish(
        state, SequenceId("q7"), ExecutorId("e9"), new, ""
    )
    assert balance.WISHES_MAX - 1 == len(state.wishes)


def test_a_paged_sequence_is_paged_in_where_slots_of_any_version_are_free() -> None:
    """Only Redis knows of which version it is."""
    world = World(random.Random(1))
    world.tell(ExecutorSeen(ExecutorId("e1"), (OfferedVersion("1", 1, 1), OfferedVersion("2", 1, 1))))
    world.waits(SequenceId("a"), moving=False)
    wished = (SequenceId("paged"), ExecutorId("e1"), Entry(1, 0, ShardId(0)), "")

    assert [MoveOut(SequenceId("paged"), NO_EPOCH, None)] == balance.wish(world.state, *wished)


def test_no_more_are_on_their_way_at_once_than_is_allowed() -> None:
    world = World(random.Random(1))
    world.join("e0")
    world.start(300)
    world.join("e1")
    world.run(seconds=1)
    state = world.state
    state.now_ms += 1000

    asked = balance.time_passed(state, "")

    assert balance.MOVES_MAX == len(asked)
    state.underway = {SequenceId(f"u{number}"): ("1", state.now_ms) for number in range(balance.MOVES_MAX - 3)}
    assert 3 == len(balance.time_passed(state, ""))


@pytest.mark.parametrize(("underway", "asked"), [(0, 4), (3, 1), (4, 0)])
def test_those_on_their_way_have_their_room(underway: int, asked: int) -> None:
    """Otherwise others leave their slots for places that are taken when they come."""
    world = World(random.Random(1))
    world.join("big", 100)
    world.start(60)
    world.join("small", 4)
    state = world.state
    state.underway = {SequenceId(f"u{number}"): ("1", state.now_ms) for number in range(underway)}
    assert [] == balance.time_passed(state, "")
    state.now_ms += balance.UNEVEN_MS

    assert asked == len(balance.time_passed(state, ""))


def test_an_executor_without_room_makes_nobody_move() -> None:
    """It is small, and full: the others' load is above the mean for good."""
    world = World(random.Random(1))
    for name, slots in (("big", 100), ("small", 2), ("tiny", 1)):
        world.join(name, slots)
    world.start(60)

    world.run(seconds=10)

    assert [1, 2, 57] == world.loads
    assert 0 == world.moved.total()


def test_load_that_is_uneven_only_for_a_moment_moves_nobody() -> None:
    world = World(random.Random(1))
    for name in ("e0", "e1"):
        world.join(name)
    world.start(40)
    on_first = [one for one in world.state.sequences.values() if one.place and one.place.executor == "e0"]
    for turn in range(10):
        for one in on_first[:10]:
            current = world.state.sequences[one.sequence]
            world.tell(SequenceOver(one.sequence, current.epoch))
        world.run(seconds=0)
        world.tell(Tick(world.state.now_ms + balance.UNEVEN_MS - 100))
        for one in on_first[:10]:
            world.waits(one.sequence, moving=False)
        world.tell(Tick(world.state.now_ms + 200))
        assert 0 == world.moved.total(), turn


def test_what_is_never_between_two_steps_is_asked_for_less_and_less_often() -> None:
    world = World(random.Random(1), busy=1.0)
    world.join("e0")
    world.start(4)
    world.join("e1")
    world.run(seconds=600)

    asked = [one.times_stayed for one in world.state.sequences.values()]
    assert 0 == world.moved.total()
    assert all(1 < times < 100 for times in asked)
