"""Full batches: callers that come back soon are waited for, when that pays and never otherwise."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from executor.core.actions import BatchMember
from executor.core.batching import Wait
from executor.core.decide import decide, next_batch
from executor.core.events import BatchDone, CheckpointFetched, OwnershipOver, RowEnd
from executor.core.gathering import (
    AWAY_BATCHES,
    HOLD_SHARE_MAX,
    NEVER,
    RETURNS,
    BatchTimes,
    Gathering,
    Line,
    Returns,
    gathers,
    line_through,
)
from executor.core.recovery import Recovery
from executor.core.sequence_batches import DirectSteps, OldestSteps, SlotSteps
from executor.core.state import Checkpoint, OwnedSequences, QueuedStep
from shared.contract.ids import Epoch, InstanceIndex, SequenceId, StepNumber
from shared.contract.messages import StepFlag
from shared.contract.model_config import Direct, ModelConfig, Oldest, SequenceBatching
from tests.executor.core.owner import SEQUENCE, step

ROWS = 4
BATCH_US = 5_000
ONLY = InstanceIndex(0)


class Played:
    """Closed-loop callers before one instance, on virtual time.

    batch_us  how long a batch of so many rows takes, by its number
    batches   rows of each batch
    waits_us  how long each batch waited after its first step was ready and the instance was free
    """

    def __init__(self, strategy: SlotSteps[QueuedStep], callers: int, think_us: tuple[int, int], *, gathers: bool):
        gathering = [Gathering(ROWS)] if gathers else []
        self.state = OwnedSequences(Recovery(), [strategy], gathering=gathering)
        self.batch_us: Callable[[int, int], int] = lambda _rows, _number: BATCH_US
        self.batches: list[int] = []
        self.waits_us: list[int] = []
        self._chance = random.Random(7)
        self._think_us = think_us
        self._steps = dict.fromkeys(range(callers), 0)
        self._arrivals: list[tuple[int, int]] = []
        for caller in range(callers):
            heappush(self._arrivals, (self._chance.randrange(BATCH_US), caller))

    def play(self, seconds: float) -> float:
        """Returns steps per second."""
        now_us, free_us, could_us, look_us = 0, 0, None, None
        running = None
        end_us = int(seconds * 1e6)
        while now_us < end_us:
            times = [self._arrivals[0][0] if self._arrivals else None, free_us if running else None, look_us]
            now_us = min(time for time in times if time is not None)
            look_us = None
            if running is not None and now_us >= free_us:
                decide(self.state, BatchDone(running, [m and RowEnd.DONE for m in running.members]), now_us)
                for member in running.members:
                    if member is not None:
                        came_us = now_us + self._chance.randint(*self._think_us)
                        heappush(self._arrivals, (came_us, int(member.queued.step.sequence[4:])))
                running = None
            while self._arrivals and self._arrivals[0][0] <= now_us:
                self._arrive(heappop(self._arrivals)[1], now_us)
            if running is None:
                batch = next_batch(self.state, ONLY, now_us, was_busy=False)
                if len(self.state.ready[0]) and could_us is None:
                    could_us = now_us
                if isinstance(batch, Wait):
                    look_us = batch.until_us
                    continue
                self.batches.append(sum(member is not None for member in batch.members))
                running, free_us = batch, now_us + self.batch_us(self.batches[-1], len(self.batches))
                self.waits_us.append(now_us - could_us if could_us is not None else 0)
                could_us = None
        return sum(self.batches) / seconds

    def _arrive(self, caller: int, now_us: int) -> None:
        self._steps[caller] += 1
        number = self._steps[caller]
        one = step(
            number,
            flags=StepFlag.START if number == 1 else StepFlag.NONE,
            sequence=SequenceId(f"m||i{caller}"),
            slot=caller,
        )
        decide(self.state, type(one)(one.step, one.message, now_us, None), now_us)


def direct() -> SlotSteps[QueuedStep]:
    return DirectSteps[QueuedStep](Direct(), ROWS)


def oldest() -> SlotSteps[QueuedStep]:
    return OldestSteps[QueuedStep](Oldest(64), ROWS)


@pytest.mark.parametrize("strategy", [direct, oldest])
def test_as_many_callers_as_rows_fill_the_batches(strategy: Callable[[], SlotSteps[QueuedStep]]) -> None:
    """Without gathering two halves take turns for ever: a step comes in just after a batch began without it."""
    halves = Played(strategy(), ROWS, (800, 1600), gathers=False)
    full = Played(strategy(), ROWS, (800, 1600), gathers=True)

    before, after = halves.play(10), full.play(10)

    assert before < 420
    assert after >= 1.4 * before
    assert sum(full.batches[50:]) / len(full.batches[50:]) > 3.8


@pytest.mark.parametrize(("callers", "least"), [(2, 1.15), (3, 1.1), (4, 1.1)])
def test_callers_that_take_half_of_a_batch_to_come_back_are_waited_for(callers: int, least: float) -> None:
    plain, gathering = (Played(oldest(), callers, (2_000, 4_000), gathers=gathers) for gathers in (False, True))

    assert gathering.play(10) >= least * plain.play(10)


@pytest.mark.parametrize("think_us", [(200, 600), (800, 1_600), (1_500, 3_000), (2_500, 5_000), (1_000, 8_000)])
@pytest.mark.parametrize("callers", range(1, 10))
def test_others_are_no_slower(callers: int, think_us: tuple[int, int]) -> None:
    """Nobody is waited for who does not come, and a caller alone never waits."""
    plain, gathering = (Played(oldest(), callers, think_us, gathers=gathers) for gathers in (False, True))

    before, after = plain.play(10), gathering.play(10)

    assert after >= 0.99 * before
    if callers == 1:
        assert {0} == set(gathering.waits_us)


@pytest.mark.parametrize("think_us", [(800, 1_600), (2_500, 5_000), (5_000, 10_000)])
@pytest.mark.parametrize("callers", [2, 4, 6])
def test_a_model_that_computes_row_by_row_is_no_slower(callers: int, think_us: tuple[int, int]) -> None:
    """Its larger batches take longer, so that waiting for rows saves nothing."""
    plain, gathering = (Played(oldest(), callers, think_us, gathers=gathers) for gathers in (False, True))
    plain.batch_us = gathering.batch_us = lambda rows, _number: rows * BATCH_US

    assert gathering.play(20) >= 0.98 * plain.play(20)


def test_a_batch_that_compiles_the_model_makes_no_other_wait() -> None:
    plain, gathering = (Played(oldest(), 3, (1_000, 60_000), gathers=gathers) for gathers in (False, True))
    plain.batch_us = gathering.batch_us = lambda _rows, number: 30_000_000 if number == 1 else BATCH_US

    assert gathering.play(50) >= 0.98 * plain.play(50)
    assert max(gathering.waits_us) <= BATCH_US


def test_callers_that_think_for_long_are_not_waited_for() -> None:
    plain, gathering = (Played(oldest(), 6, (20_000, 60_000), gathers=gathers) for gathers in (False, True))

    before, after = plain.play(20), gathering.play(20)

    assert after >= 0.99 * before
    assert sum(gathering.waits_us) <= 0.01 * 20e6


def test_no_batch_waits_longer_than_its_share() -> None:
    played = Played(oldest(), ROWS, (100, 4_000), gathers=True)
    played.play(10)

    assert max(played.waits_us) <= HOLD_SHARE_MAX * BATCH_US + 1


@pytest.mark.parametrize(("sequences", "length", "most"), [(40, 1, 11), (20, 2, 11), (12, 4, 13)])
@pytest.mark.parametrize("strategy", [direct, oldest])
def test_a_successor_is_in_the_next_batch(
    strategy: Callable[[], SlotSteps[QueuedStep]], sequences: int, length: int, most: int
) -> None:
    """Four slots, 100 ms a batch, and all callers at once: no more batches than Triton's direct strategy takes."""
    played = Slots(strategy(), sequences, length, batch_us=100_000)

    played.play()

    assert sequences * length == sum(played.batches)
    assert len(played.batches) <= most


class Slots:
    """Sequences of one length that wait for one of four slots; each caller sends its next step when it is answered."""

    def __init__(self, strategy: SlotSteps[QueuedStep], sequences: int, length: int, *, batch_us: int) -> None:
        self.state = OwnedSequences(Recovery(), [strategy], gathering=[Gathering(ROWS)])
        self.batches: list[int] = []
        self._length, self._batch_us = length, batch_us
        self._waiting = deque(range(sequences))
        self._chance = random.Random(7)
        self._arrivals: list[tuple[int, int, int, int]] = []

    def play(self) -> None:
        """Plays until every step has run. A slot is free and given to the next within 3 to 6 ms."""
        for slot in range(ROWS):
            self._assign(slot, 0)
        now_us, look_us = 0, NEVER
        while self._arrivals or len(self.state.ready[0]):
            now_us = max(now_us, min(self._next_us, look_us))
            self._arrive_until(now_us)
            batch = next_batch(self.state, ONLY, now_us, was_busy=False)
            if isinstance(batch, Wait):
                look_us = NEVER if batch.until_us is None else batch.until_us
                continue
            members = [member for member in batch.members if member is not None]
            self.batches.append(len(members))
            look_us = now_us = now_us + self._batch_us
            self._arrive_until(now_us)
            decide(self.state, BatchDone(batch, [m and RowEnd.DONE for m in batch.members]), now_us)
            for member in members:
                self._answered(member, now_us)

    @property
    def _next_us(self) -> int:
        return self._arrivals[0][0] if self._arrivals else NEVER

    def _arrive_until(self, now_us: int) -> None:
        while self._next_us <= now_us:
            self._arrive(*heappop(self._arrivals))

    def _answered(self, member: BatchMember, now_us: int) -> None:
        owned, number = member.owned, member.queued.step.step
        if number < self._length:
            came_us = now_us + self._chance.randint(1_500, 4_000)
            heappush(self._arrivals, (came_us, int(owned.sequence[4:]), number + 1, owned.slot))
            return
        decide(self.state, OwnershipOver(owned.sequence, owned.epoch), now_us)
        self._assign(owned.slot, now_us)

    def _assign(self, slot: int, now_us: int) -> None:
        if self._waiting:
            came_us = now_us + self._chance.randint(3_000, 6_000)
            heappush(self._arrivals, (came_us, self._waiting.popleft(), 1, slot))

    def _arrive(self, now_us: int, caller: int, number: int, slot: int) -> None:
        flags = (StepFlag.START if number == 1 else StepFlag.NONE) | (StepFlag.END if number == self._length else 0)
        one = step(number, flags=flags, sequence=SequenceId(f"m||i{caller}"), slot=slot)
        decide(self.state, type(one)(one.step, one.message, now_us, None), now_us)


def known(*returns_us: int) -> Gathering:
    gathering = Gathering(ROWS)
    for _ in range(2):
        gathering.times.learn(1, 8_000)
    # As often as it takes to forget what was assumed.
    for _ in range(RETURNS):
        for return_us in returns_us:
            gathering.returns.learn(return_us)
    return gathering


def test_the_time_for_which_a_batch_was_staged_is_not_its_own() -> None:
    gathering = Gathering(ROWS)
    gathering.ran(1, 1_000, 6_000)
    gathering.ran(1, 2_000, 11_000)

    gathering.ran(1, 3_000, 16_000)

    assert 5_000 == gathering.times.usual_us


def test_a_sequence_that_is_gone_is_not_waited_for() -> None:
    gathering = known(900)
    gathering.away[SequenceId("m||i1")] = 0
    assert gathering.wait_until(1, 10) == 1_610, "the shortest of the waits that are compared in which it comes"

    gathering.away.clear()

    assert gathering.wait_until(1, 20) is None
    assert 0 == gathering.begun(1)


def test_a_sequence_that_is_dropped_after_its_step_is_not_waited_for() -> None:
    state = OwnedSequences(Recovery(), [oldest()], gathering=[gathering := known(900)])
    decide(state, step(1, flags=StepFlag.START), 0)
    batch = next_batch(state, ONLY, 0, was_busy=False)
    assert not isinstance(batch, Wait)
    decide(state, BatchDone(batch, [RowEnd.DONE]), 8_000)
    assert [8_000] == list(gathering.away.values())

    decide(state, OwnershipOver(SEQUENCE, Epoch(1)), 8_001)

    assert not gathering.away


def test_who_usually_comes_later_than_a_batch_takes_is_not_waited_for() -> None:
    gathering = known(900, 50_000, 50_000, 50_000, 50_000, 50_000)
    gathering.away[SequenceId("m||i1")] = 0

    assert gathering.wait_until(1, 10) is None


def test_a_successor_that_has_not_come_within_a_batch_is_not_waited_for_any_more() -> None:
    gathering = known(900)
    for _ in range(RETURNS):
        gathering.successions.learn(900)
    gathering.ended += [0, 4_000]
    assert gathering.wait_until(1, 4_010) is not None, "the later one is still expected"
    gathering.begun(1)

    assert gathering.wait_until(1, 8_001) is None
    assert [4_000] == list(gathering.ended)
    assert [63 / 64] == gathering.successions.expected([0], [900], 0), "one of the latest has never come"


def test_a_sequence_that_has_not_come_back_within_a_batch_is_not_waited_for_any_more() -> None:
    gathering = known(900)
    gathering.away |= {SequenceId("m||i1"): 0, SequenceId("m||i2"): 4_000}

    assert gathering.wait_until(1, 8_001) is None
    assert [4_000] == list(gathering.away.values())
    assert [63 / 64] == gathering.returns.expected([0], [900], 0), "one of the latest has never come"


def test_returns_of_long_ago_are_forgotten_and_who_is_later_than_all_hides_nobody_behind() -> None:
    returns = Returns()
    for took_us in (*[1_000] * RETURNS, *[6_000] * (RETURNS // 2), *[9_000] * (RETURNS // 2)):
        returns.learn(took_us)

    assert [0.0, 0.5, 1.0] == returns.expected([0], [2_000, 6_000, 9_000], 0)
    assert [1.0] == returns.expected([0, 9_500], [2_500], 16_000), "of two that are away the first is late"


def test_a_batch_takes_what_the_medians_of_smaller_and_larger_ones_say() -> None:
    """Two rows take 3 ms, six take 5 ms: half a ms for each row, and two beside."""
    line = line_through([(2, 3_000), (2, 90_000), (2, 3_000), (6, 5_000), (6, 5_000), (6, 90_000)])
    assert Line(5_000, 2_000.0, 500.0) == line
    # Larger batches that take no longer, or more than in proportion, and one batch alone.
    assert Line(3_000, 3_000) == line_through([(2, 3_000), (6, 3_000)])
    assert Line(3_000, 0.0, 3_000.0) == line_through([(1, 3_000), (6, 18_000)])
    assert Line() == line_through([(2, 3_000)])
    times = BatchTimes()
    for rows, took_us in ((2, 3_000), (6, 5_000)):
        times.learn(rows, took_us)
    assert (4_000.0, 3_000) == (times.of(4), times.usual_us)


def test_of_very_many_sequences_that_are_away_the_latest_are_remembered() -> None:
    """While batches are full nobody asks who is late: the first who asks would have to forget all of them."""
    gathering = known(900)
    most = AWAY_BATCHES * gathering.rows
    for number in range(10 * most):
        gathering.left(SequenceId(f"m||i{number}"), number)

    assert (most, 9 * most) == (len(gathering.away), next(iter(gathering.away.values())))


def test_of_very_many_sequences_that_ended_the_latest_are_remembered() -> None:
    """Those that came with their state, and end here, have no successor here: it may start elsewhere."""
    state = OwnedSequences(Recovery(), [oldest()], gathering=[gathering := Gathering(ROWS)])
    most = AWAY_BATCHES * gathering.rows
    for number in range(2 * most):
        decide(state, step(2, sequence=(name := SequenceId(f"m||i{number}")), flags=StepFlag.END, committed=1), number)
        found = Checkpoint(Epoch(1), StepNumber(1), StepNumber(1), StepNumber(1), None)
        decide(state, CheckpointFetched(state.by_id[name], found), number)
        batch = next_batch(state, ONLY, number, was_busy=False)
        assert not isinstance(batch, Wait)
        decide(state, BatchDone(batch, [RowEnd.DONE]), number)
        decide(state, OwnershipOver(name, Epoch(1)), number)

    assert (most, most) == (len(gathering.ended), gathering.ended[0])


def test_a_batch_whose_rows_have_left_meanwhile_has_gained_none() -> None:
    """What counts the gained rows never falls."""
    gathering = known(900)
    gathering.away[SequenceId("m||i1")] = 0
    gathering.wait_until(2, 10)

    assert 0 == gathering.begun(1)


def test_what_a_batch_gained_is_told_once() -> None:
    gathering = known(900)
    for number in range(3):
        gathering.away[SequenceId(f"m||i{number}")] = 0
    gathering.wait_until(1, 10)
    for number in range(3):
        gathering.came(SequenceId(f"m||i{number}"), 900 + number)

    assert gathering.wait_until(4, 902) is None
    assert (3, None) == (gathering.begun(4), gathering.begun(4))


@pytest.mark.parametrize(
    ("expected", "strategy", "parameters"),
    [
        (True, Direct(), {}),
        (True, Oldest(4), {}),
        (False, Direct(), {"batch_gathering": "off"}),
        (False, Direct(max_queue_delay_us=100), {}),
        (False, Direct(minimum_slot_utilization=0.5), {}),
        (False, Oldest(4, max_queue_delay_us=100), {}),
        (True, Oldest(4, preferred_batch_sizes=(4,)), {}),
        (False, Oldest(4, preferred_batch_sizes=(2,)), {}),
    ],
)
def test_the_configuration_decides_where_it_says_anything(
    strategy: Direct | Oldest, parameters: dict[str, str], *, expected: bool
) -> None:
    batching = SequenceBatching(strategy, 1000)
    assert expected == gathers(
        ModelConfig("m", "python", "", 4, (), (), sequence_batching=batching, parameters=parameters)
    )
    assert not gathers(ModelConfig("m", "python", "", 0, (), (), sequence_batching=batching))
    assert not gathers(ModelConfig("m", "python", "", 4, (), ()))


def test_a_wait_for_steps_that_were_withdrawn_is_over() -> None:
    """The next batch begins a wait of its own."""
    gathering = known(900)
    ready = oldest()
    state = OwnedSequences(Recovery(), [ready], gathering=[gathering])
    gathering.away[SequenceId("m||i1")] = 0
    decide(state, step(1, flags=StepFlag.START, sequence=SequenceId("m||i2")), 10)
    next_batch(state, ONLY, 10, was_busy=False)
    assert gathering.hold is not None

    decide(state, OwnershipOver(SequenceId("m||i2"), Epoch(1)), 11)
    next_batch(state, ONLY, 11, was_busy=False)

    assert gathering.hold is None
