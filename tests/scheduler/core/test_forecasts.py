"""What waiting sequences are told of their wait, compared with how long they then wait: the core on a virtual clock."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from scheduler.core import invariants
from scheduler.core.actions import Action, Assign, LookAtIdle, Publish
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide
from scheduler.core.events import (
    Assigned,
    ClockRead,
    Event,
    ExecutorSeen,
    ForecastAsked,
    IdleSeen,
    SequenceOver,
    SequenceWaits,
    Tick,
)
from scheduler.core.freed_slots import KEPT, FreedSlots
from scheduler.core.slots import OfferedVersion
from scheduler.core.state import LeaderState
from shared.contract.forecast import Forecast, Outlook
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId

Draw = Callable[[Random], float]
LENGTHS: dict[str, Draw] = {
    "at random": lambda chance: chance.expovariate(1 / 5000),
    "within bounds": lambda chance: chance.uniform(100, 10_000),
    "all alike": lambda _: 5000.0,
    "some very long": lambda chance: 1500 * chance.paretovariate(1.5),
}
"""How long a sequence holds its slot, ms."""
HITS_MIN = 0.7
"""Of waits that end within what was said; it is said of four out of five, if slots become free at random."""
MIDDLE_MIN, MIDDLE_MAX = 0.3, 2.0
"""The middle one of the waits over what was said: where few sequences hold a slot for very long, most wait less."""
SEQUENCES = 600
TICK_MS = 1000


QUESTION = ForecastAsked(SequenceId("m||s"), Entry(1, 0, ShardId(0)))


@dataclass
class Hall:
    """A model's clients: there are always `line` more than slots. `draw` says how long a sequence holds its slot."""

    slots: int
    line: int
    draw: Draw
    chance: Random
    state: LeaderState = field(default_factory=LeaderState)
    ends: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    told: dict[str, tuple[int, Outlook]] = field(default_factory=dict[str, tuple[int, Outlook]])
    waited: list[tuple[int, Outlook]] = field(default_factory=list[tuple[int, Outlook]])
    count: int = 0
    now_ms: int = 1_000_000

    def run(self) -> None:
        self.take(ExecutorSeen(ExecutorId("e"), (OfferedVersion("1", 1, self.slots),)))
        for _ in range(self.slots + self.line):
            self.comes()
        while self.ends and self.count < SEQUENCES:
            until = self.ends[0][0]
            # Somebody asks at even times, and not when a slot becomes free: else the wait would be known to be short.
            while (tick_ms := (self.now_ms // TICK_MS + 1) * TICK_MS) < until:
                self.now_ms = tick_ms
                for event in (ClockRead(tick_ms), QUESTION, Tick(tick_ms)):
                    self.take(event)
            self.now_ms = until
            self.take(ClockRead(until))
            _, name, epoch = heapq.heappop(self.ends)
            self.take(SequenceOver(SequenceId(name), Epoch(epoch)))
            self.comes()

    def comes(self) -> None:
        self.count += 1
        name = f"m||s{self.count}"
        self.take(SequenceWaits(SequenceId(name), "1", Entry(self.now_ms, self.count, ShardId(0))))

    def take(self, event: Event) -> None:
        for action in decide(self.state, event):
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case Assign(sequence, _, entry):
                if sequence in self.told:
                    said_ms, outlook = self.told.pop(sequence)
                    self.waited.append((self.now_ms - said_ms, outlook))
                self.take(Assigned(sequence, entry, Epoch(self.count)))
                held_ms = max(1, round(self.draw(self.chance)))
                heapq.heappush(self.ends, (self.now_ms + held_ms, sequence, self.count))
            case LookAtIdle():
                self.take(IdleSeen(()))
            case Publish(lines):
                (line,) = lines
                assert [waiting.sequence for waiting in self.state.backlogs["1"].in_order()] == list(line.line)
                outlook = Forecast(lines).of(chosen) if (chosen := self.chance.choice(line.line)) else None
                if outlook is not None and outlook.wait_ms is not None:
                    # The first word counts: later ones about the same sequence would count its wait several times.
                    self.told.setdefault(chosen, (self.now_ms, outlook))
            case _:
                pass


@pytest.mark.parametrize("line", [1, 6])
@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_most_waits_end_within_what_was_said(lengths: str, slots: int, line: int) -> None:
    hall = Hall(slots, line, LENGTHS[lengths], Random(slots + line))
    hall.run()
    invariants.check(hall.state)
    hits = [(said.low_ms or 0) <= waited <= (said.high_ms or 0) for waited, said in hall.waited]
    middle = statistics.median((waited + 1) / ((said.wait_ms or 0) + 1) for waited, said in hall.waited)

    assert len(hits) > 30
    assert sum(hits) / len(hits) >= HITS_MIN
    assert MIDDLE_MIN < middle < MIDDLE_MAX


def test_only_the_time_without_a_free_slot_counts() -> None:
    slots = FreedSlots()
    slots.taken(0, all_taken=False)
    slots.freed(500)
    slots.taken(1000, all_taken=True)
    slots.freed(1400)
    slots.taken(1400, all_taken=False)
    slots.freed(1500)
    slots.taken(2000, all_taken=True)
    slots.taken(2100, all_taken=True)

    assert (600, 1, 1.0) == slots.seen(2200)


def test_slots_that_are_free_for_no_time_count() -> None:
    slots = FreedSlots()
    for _ in range(3):
        slots.taken(1000, all_taken=True)
        slots.freed(1000)
        slots.taken(1000, all_taken=False)
    slots.taken(1000, all_taken=True)

    assert (500, 3) == slots.seen(1500)[:2]


def test_a_rate_follows_a_change_and_old_slots_are_forgotten() -> None:
    slots = FreedSlots()
    slots.taken(0, all_taken=True)
    for number in range(200):
        slots.freed(100 * (number + 1))
    observed_ms, freed, spread = slots.seen(20_000)

    assert (100 * (KEPT - 1), KEPT - 1, 1.0) == (observed_ms, freed, spread)
    assert (600_000, 0) == slots.seen(900_000)[:2]


def test_bursts_count_as_what_they_are() -> None:
    slots = FreedSlots()
    slots.taken(0, all_taken=True)
    for burst in range(4):
        for _ in range(8):
            slots.freed(1000 * (burst + 1))
    observed_ms, freed, spread = slots.seen(5000)

    assert (5000, 32) == (observed_ms, freed)
    # Of 31 times between two slots 3 are a second: their variance, by the square of their mean.
    assert spread == pytest.approx(31 / 3 - 1)


def test_a_clock_that_is_set_back_stops_no_forecast() -> None:
    state = LeaderState()
    decide(state, Tick(50_000_000))
    assert any(isinstance(action, LookAtIdle) for action in decide(state, QUESTION))
    state.now_ms = 1000

    assert any(isinstance(action, LookAtIdle) for action in decide(state, QUESTION))
