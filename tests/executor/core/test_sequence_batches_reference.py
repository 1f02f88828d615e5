"""Direct and oldest against a naive model of Triton's rules: the same arrivals, the same batches at the same times.

The naive model looks at every microsecond and searches every possible batch. What the executor uses looks only when
something happens or when it said that it wants to look again, so a wrong time to wake up shows as a late batch. And
what the executor stages while another batch runs must be what the rules choose when that one has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.batching import Wait
from executor.core.sequence_batches import AnySlotSteps, Batch, DirectSteps, OldestSteps, SlotSteps
from shared.contract.ids import SlotIndex
from shared.contract.model_config import Direct, Oldest

DIRECT_ROWS = 4
CANDIDATES = 6
LONG_ENOUGH = 10_000


@dataclass(frozen=True)
class Arrival:
    """A step that reaches the executor. shape_key: of its inputs."""

    number: int
    at_us: int
    slot: int
    shape_key: str


Trace = list[tuple[int, tuple[int | None, ...]]]
"""When each batch began, and the numbers of its steps, None for a null row."""


def finished_us(began_us: int, batch_us: int) -> int:
    """When a batch ends: at an even time, while steps arrive at odd ones, so that nothing happens at once."""
    ends = began_us + batch_us
    return ends + ends % 2


def played(steps: SlotSteps[Arrival], arrivals: list[Arrival], batch_us: int) -> Trace:
    """Drives the executor's own rules as its loop does: by events and by the time to look again."""
    return driven(steps, arrivals, batch_us, stages=True)


def driven(steps: SlotSteps[Arrival], arrivals: list[Arrival], batch_us: int, *, stages: bool) -> Trace:
    """stages: batches that are full are taken while another one runs"""
    waiting: dict[int, deque[Arrival]] = {}
    outside = deque(arrivals)
    running: list[Arrival] = []
    staged: Batch[Arrival] | None = None
    ends_us: int | None = None
    trace: Trace = []
    now_us, look_us = 0, None
    while outside or running or len(steps):
        now_us = min(time for time in (outside[0].at_us if outside else None, ends_us, look_us) if time is not None)
        was_busy = ends_us == now_us
        if was_busy:
            ends_us = None
            for step in running:
                waiting[step.slot].popleft()
                offer_next(steps, waiting[step.slot], now_us)
            running = []
        while outside and outside[0].at_us == now_us:
            step = outside.popleft()
            queue = waiting.setdefault(step.slot, deque())
            queue.append(step)
            if len(queue) == 1:
                offer_next(steps, queue, now_us)
        look_us = None
        if running:
            staged = staged or (steps.full(now_us) if stages else None)
            for step in staged or ():
                steps.withdraw(SlotIndex(step.slot if step else -1))
            continue
        decision, staged = staged or steps.decide(now_us, was_busy=was_busy), None
        if isinstance(decision, Wait):
            assert decision.until_us is None or decision.until_us > now_us
            look_us = decision.until_us
            continue
        running = [step for step in decision if step is not None]
        for step in running:
            steps.withdraw(SlotIndex(step.slot))
        ends_us = finished_us(now_us, batch_us)
        trace.append((now_us, tuple(step and step.number for step in decision)))
    return trace


def offer_next(steps: SlotSteps[Arrival], queue: deque[Arrival], now_us: int) -> None:
    if queue:
        steps.offer(SlotIndex(queue[0].slot), queue[0], arrived_us=queue[0].at_us, now_us=now_us)


@dataclass(frozen=True)
class Head:
    """The naive model's view of a slot's next step. order: among those that became heads at the same time."""

    step: Arrival
    since_us: int
    order: int


class Naive:
    """The rules as the documents tell them, microsecond by microsecond."""

    def __init__(self, strategy: Direct | Oldest, max_batch_size: int) -> None:
        self.strategy = strategy
        self.limit = max(1, max_batch_size)

    def played(self, arrivals: list[Arrival], batch_us: int) -> Trace:
        done: set[int] = set()
        free_us: dict[int, tuple[int, int]] = {}
        trace: Trace = []
        idle_from_us = 0
        for now_us in range(LONG_ENOUGH):
            if now_us < idle_from_us:
                continue
            was_busy = now_us == idle_from_us and bool(trace)
            rows = self.rows(self.heads(arrivals, done, free_us, now_us), now_us, was_busy=was_busy)
            if rows is None:
                if len(done) == len(arrivals):
                    return trace
                continue
            idle_from_us = finished_us(now_us, batch_us)
            for order, step in enumerate(step for step in rows if step is not None):
                done.add(step.number)
                free_us[step.slot] = (idle_from_us, order)
            trace.append((now_us, tuple(step and step.number for step in rows)))
        raise AssertionError(f"{len(arrivals) - len(done)} steps never ran")

    @staticmethod
    def heads(arrivals: list[Arrival], done: set[int], free_us: dict[int, tuple[int, int]], now_us: int) -> list[Head]:
        """The first step of each slot that has arrived and is not done, in the order of becoming that."""
        first: dict[int, Arrival] = {}
        for step in arrivals:
            if step.number not in done and step.at_us <= now_us:
                first.setdefault(step.slot, step)
        heads: list[Head] = []
        for step in first.values():
            since_us, order = max((step.at_us, 0), free_us.get(step.slot, (0, 0)))
            heads.append(Head(step, since_us, order))
        return sorted(heads, key=lambda head: (head.since_us, head.order))

    def rows(self, heads: list[Head], now_us: int, *, was_busy: bool) -> list[Arrival | None] | None:
        if not heads:
            return None
        match self.strategy:
            case Direct() as direct:
                return self.direct_rows(direct, [head.step for head in heads], now_us)
            case Oldest() as oldest:
                return self.oldest_rows(oldest, heads, now_us, was_busy=was_busy)

    def direct_rows(self, strategy: Direct, heads: list[Arrival], now_us: int) -> list[Arrival | None] | None:
        waited_us = now_us - min(step.at_us for step in heads)
        has_delay = strategy.max_queue_delay_us != 0 and strategy.minimum_slot_utilization != 0
        is_full_enough = len(heads) / self.limit >= strategy.minimum_slot_utilization
        if has_delay and not is_full_enough and waited_us <= strategy.max_queue_delay_us:
            return None
        shape = min(heads, key=lambda step: step.at_us).shape_key
        rows: list[Arrival | None] = [None] * (1 + max(step.slot for step in heads))
        for step in heads:
            if step.shape_key == shape:
                rows[step.slot] = step
        return rows

    def oldest_rows(
        self, strategy: Oldest, heads: list[Head], now_us: int, *, was_busy: bool
    ) -> list[Arrival | None] | None:
        possible = [
            size
            for size in range(1, min(self.limit, len(heads)) + 1)
            if len({head.step.shape_key for head in heads[:size]}) == 1
        ]
        preferred = strategy.preferred_batch_sizes or (self.limit,)
        delay_us = strategy.max_queue_delay_us
        is_late = delay_us != 0 and now_us - heads[0].since_us >= delay_us
        reached = [size for size in possible if size in preferred]
        all_possible = delay_us == 0 or len(heads) > max(possible) or max(possible) >= max(preferred)
        if is_late or (all_possible and ((was_busy and delay_us != 0) or not reached)):
            size = max(possible)
        elif reached:
            size = max(reached)
        else:
            return None
        return [head.step for head in heads[:size]]


def traffic(slots: int) -> st.SearchStrategy[list[Arrival]]:
    """Steps at odd times, mostly close together, in any slots, of two shapes."""
    steps = st.tuples(st.sampled_from([0, 1, 2, 5, 20]), st.integers(0, slots - 1), st.sampled_from("aaab"))

    def arrivals(drawn: list[tuple[int, int, str]]) -> list[Arrival]:
        made: list[Arrival] = []
        now_us = 1
        for number, (pause, slot, shape) in enumerate(drawn, 1):
            now_us += 2 * pause
            made.append(Arrival(number, now_us, slot, shape))
        return made

    return st.lists(steps, max_size=30).map(arrivals)


# Some are the pause between two arrivals, so that a step arrives in the very moment in which a delay ends.
delays = st.sampled_from([0, 1, 4, 10, 40, 200])


@settings(deadline=None)
@given(
    arrivals=traffic(DIRECT_ROWS),
    strategy=st.builds(Direct, delays, st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0])),
    batch_us=st.integers(1, 40),
)
def test_direct_batches_as_the_naive_model(arrivals: list[Arrival], strategy: Direct, batch_us: int) -> None:
    expected = Naive(strategy, DIRECT_ROWS).played(arrivals, batch_us)

    assert expected == played(DirectSteps(strategy, DIRECT_ROWS), arrivals, batch_us)


@settings(deadline=None)
@given(
    arrivals=traffic(CANDIDATES),
    limit=st.integers(0, CANDIDATES + 1),
    preferred=st.sets(st.integers(1, CANDIDATES), max_size=3),
    delay_us=delays,
    batch_us=st.integers(1, 40),
)
def test_oldest_batches_as_the_naive_model(
    arrivals: list[Arrival], limit: int, preferred: set[int], delay_us: int, batch_us: int
) -> None:
    sizes = tuple(size for size in preferred if size <= max(1, limit))
    strategy = Oldest(CANDIDATES, sizes, delay_us)

    expected = Naive(strategy, limit).played(arrivals, batch_us)

    assert expected == played(OldestSteps(strategy, limit), arrivals, batch_us)


@settings(deadline=None)
@given(
    arrivals=traffic(CANDIDATES),
    limit=st.integers(0, CANDIDATES),
    strategy=st.builds(Direct, delays, st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    batch_us=st.integers(1, 40),
)
def test_batches_from_any_slots_are_the_same_if_they_are_staged(
    arrivals: list[Arrival], limit: int, strategy: Direct, batch_us: int
) -> None:
    expected, actual = (
        driven(AnySlotSteps(strategy, limit), arrivals, batch_us, stages=stages) for stages in (False, True)
    )

    assert expected == actual


@pytest.mark.parametrize("strategy", [Direct(50, 1.0), Oldest(2, (2,), 50)])
def test_the_naive_model_itself_waits_for_a_second_step_and_gives_up(strategy: Direct | Oldest) -> None:
    """The oracle does what the rules say in a case that can be worked out by hand."""
    together = [Arrival(1, 1, 0, "a"), Arrival(2, 21, 1, "a")]
    alone = [Arrival(1, 1, 0, "a"), Arrival(2, 201, 1, "a")]
    late = 52 if isinstance(strategy, Direct) else 51

    assert [(21, (1, 2))] == Naive(strategy, 2).played(together, 4)
    assert late == Naive(strategy, 2).played(alone, 4)[0][0]
