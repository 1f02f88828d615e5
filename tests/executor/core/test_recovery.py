"""What a takeover finds is what the owner had, whenever it comes; and what is kept for it is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.actions import HowAnswered, StepAnswer
from executor.core.events import RowEnd
from executor.core.recovery import Change, Checkpoints, Log, Recovery, recovery_of
from executor.core.state import Checkpoint, QueuedStep, VoidCause
from shared.contract.ids import Epoch, SequenceId, StepNumber, follows_another
from shared.contract.messages import InboxCancelled, StepFlag
from shared.contract.model_config import ModelConfig, Oldest, SequenceBatching, StateSpec
from tests.executor.core.owner import SEQUENCE, Owner, step

START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE
FOLLOWER = SequenceId("m|@e/s#1|i7")

State = tuple[int, ...]


class Course(Enum):
    """What becomes of a step, as often as it is run.

    PASSES  it succeeds in its third pass
    LEFT    its caller leaves while the first pass runs, and the model wants another one
    SAVED   it fails, and the model hands out its state, if it is asked for it
    """

    DONE = "done"
    PASSES = "passes"
    FAILED = "failed"
    SAVED = "saved"
    LOST = "lost"
    CANCELLED = "cancelled"
    LEFT = "left"

    @property
    def succeeds(self) -> bool:
        return self in (Course.DONE, Course.PASSES)

    @property
    def fails(self) -> bool:
        return self in (Course.FAILED, Course.SAVED)


DONE, FAILED = Course.DONE, Course.FAILED
VOIDS = {Course.LOST: VoidCause.LOST, Course.CANCELLED: VoidCause.CANCELLED, Course.LEFT: VoidCause.CANCELLED}


def void_behind(course: Course, void: VoidCause | None, *, begins: bool, sequence: SequenceId) -> VoidCause | None:
    """Why the sequence has no state behind a step. void: why it had none before it"""
    if void is not None and not begins and course is not Course.CANCELLED:
        return void
    if course in VOIDS:
        return VOIDS[course]
    return VoidCause.FAILED if course.fails and (begins or follows_another(sequence)) else None


@dataclass
class Record:
    """What Redis holds of the sequence, and the model of the truth beside it.

    wanted  the answer to each step: the state that it left, None where it gave none
    """

    recovery: Recovery
    steps: Sequence[tuple[StepFlag, Course]]
    message: bytes = b"1234"
    sequence: SequenceId = SEQUENCE
    committed: int = 0
    base: int = 0
    checkpoint: State = ()
    void: VoidCause | None = None
    failed: list[int] = field(default_factory=list[int])
    entries: dict[str, int] = field(default_factory=dict[str, int])
    recoverable: bool = True
    answers: list[State | None] = field(default_factory=list["State | None"])
    epoch: int = 0

    @property
    def wanted(self) -> list[State | None]:
        state: State = ()
        void: VoidCause | None = None
        told: list[State | None] = []
        for number, (flags, course) in enumerate(self.steps, 1):
            begins = bool(flags & START)
            ok = course.succeeds and (begins or void is None)
            if ok:
                state = (number,) if begins else (*state, number)
            told.append(state if ok else None)
            void = void_behind(course, void, begins=begins, sequence=self.sequence)
        return told

    def deliver(self, number: int) -> QueuedStep:
        """A step as the present owner's inbox brings it."""
        self.entries[f"{self.epoch}-{number}"] = number
        flags, course = self.steps[number - 1]
        return step(
            number,
            flags=flags,
            epoch=self.epoch,
            committed=self.committed,
            message=self.message,
            sequence=self.sequence,
            cancelled=course is Course.CANCELLED,
        )

    def owner(self) -> Holder:
        """The sequence in the hands of another executor."""
        self.epoch += 1
        left = {number for number in self.entries.values() if number > self.base}
        self.entries.clear()
        owner = Owner(self.recovery)
        for number in sorted({*left, self.committed + 1}):
            owner.take(self.deliver(number))
        if owner.state.awaited:
            owner.restore(self.checkpoint_of(self.void), self.sequence)
        return Holder(self, owner, self.checkpoint)

    def checkpoint_of(self, void: VoidCause | None = None) -> Checkpoint:
        failed = tuple((StepNumber(number), StepNumber(number)) for number in self.failed)
        # The next step was accepted, too.
        starts = [number for number, (flags, _) in enumerate(self.steps[: self.committed + 1], 1) if flags & START]
        numbers = (StepNumber(self.base), StepNumber(self.committed), StepNumber(max(starts)))
        held = b"state" if self.checkpoint and void is None else None
        return Checkpoint(Epoch(self.epoch), *numbers, void, failed=failed, model_state=held)

    def commit(self, number: int, change: Change, state: State | None, answer: State | None) -> None:
        """What `commit.lua` does."""
        assert self.committed + 1 == number
        self.committed = number
        self.answers.append(answer)
        flags, course = self.steps[number - 1]
        begins = bool(flags & START)
        if begins and answer is not None:
            self.checkpoint = ()
        if state is not None:
            self.checkpoint = state
        ran = self.void is None or begins
        if change.base:
            self.base, self.failed = change.base, []
        elif course.fails and ran:
            self.failed.append(number)
        self.void = void_behind(course, self.void, begins=begins, sequence=self.sequence)
        if change.recoverable is not None:
            self.recoverable = change.recoverable
        for entry in change.entries:
            del self.entries[entry]
        done = [entry for entry, n in self.entries.items() if n <= number]
        assert not (self.void and done), "the sequence may be over, and they would stay"


@dataclass
class Holder:
    """An executor that runs the sequence.

    state    what the model holds
    saved    what of it goes out with the commit of the latest step
    pending  commits that have not reached Redis: step, change, state that goes with it, answer
    """

    record: Record
    owner: Owner
    state: State
    saved: State | None = None
    pending: list[tuple[int, Change, State | None, State | None]] = field(default_factory=list[Any])

    def deliver(self, number: int) -> None:
        """A step comes."""
        self.owner.take(self.record.deliver(number))

    def run(self, *, commits: bool = True, dies_in_pass: bool = False) -> None:
        """Runs up to and including the next step that is not a replay."""
        while not (answers := [one for commit in self.owner.commits for one in commit.answers]):
            if not self._run_once() and dies_in_pass:
                return
        self.owner.commits.clear()
        self.pending += map(self._pending, answers)
        if commits:
            self.commit(len(self.pending))

    def commit(self, most: int) -> None:
        """So many commits reach Redis."""
        for one in self.pending[:most]:
            self.record.commit(*one)
        del self.pending[:most]

    def _run_once(self) -> bool:
        """Runs one batch. Returns whether the step has ended with it."""
        record, batch = self.record, self.owner.begin()
        assert batch is not None
        (member,) = batch.members
        assert member is not None
        number, replays = member.queued.step.step, member.owned.replays
        flags, course = record.steps[number - 1]
        assert not (replays and member.save)
        assert not replays or course.succeeds, "only what succeeded is replayed"
        if (course is Course.PASSES and member.owned.passes < 2) or course is Course.LEFT:
            if course is Course.LEFT:
                self.owner.take(InboxCancelled("9-9", record.sequence, Epoch(record.epoch), StepNumber(number)))
            self.owner.end(batch, RowEnd.AGAIN)
            return False
        if course.succeeds:
            self.state = (number,) if flags & START else (*self.state, number)
        end = RowEnd.DONE if course.succeeds else RowEnd(course.value)
        self.saved = self.state if member.save and end in (RowEnd.DONE, RowEnd.SAVED) else None
        self.owner.end(batch, RowEnd.FAILED if end is RowEnd.SAVED and not member.save else end)
        return True

    def _pending(self, answer: StepAnswer) -> tuple[int, Change, State | None, State | None]:
        number = answer.queued.step.step
        ran = answer.how is HowAnswered.RAN
        succeeded = ran and self.record.steps[number - 1][1].succeeds
        return number, answer.change, self.saved if ran else None, self.state if succeeded else None


DEATHS = ["dies in a pass", "dies before its commits", "dies amid its commits", "dies behind them"]
courses = st.sampled_from([*[DONE] * 6, *[FAILED] * 2, *Course])


@given(
    recovery=st.one_of(st.builds(Checkpoints, st.integers(1, 6)), st.just(Log(1000, 1 << 20))),
    sequence=st.sampled_from([SEQUENCE, FOLLOWER]),
    steps=st.lists(st.tuples(st.sampled_from([NONE, NONE, NONE, START]), courses), min_size=1, max_size=24),
    ends=st.booleans(),
    lives=st.lists(st.sampled_from(["runs", "runs", "runs", "runs ahead", "runs ahead", *DEATHS]), min_size=30),
)
def test_a_takeover_finds_what_the_owner_had(
    recovery: Recovery, sequence: SequenceId, steps: list[tuple[StepFlag, Course]], lives: list[str], *, ends: bool
) -> None:
    """Killed at any moment, as often as one likes: every step has its one answer, built on those before it."""
    if ends:
        steps = [*steps[:-1], (steps[-1][0] | END, steps[-1][1])]
    record = Record(recovery, [(START, DONE), *steps], sequence=sequence)
    owner = record.owner()
    fates = iter([*lives, *["runs"] * 100])
    while record.committed < len(record.steps):
        number, fate = record.committed + len(owner.pending) + 1, next(fates)
        if number > len(record.steps):
            owner.commit(len(owner.pending))
            continue
        if number not in record.entries.values():
            owner.deliver(number)
        owner.run(commits=fate in ("runs", "dies behind them"), dies_in_pass=fate == "dies in a pass")
        owner.commit(1 if fate == "dies amid its commits" else 0)
        if fate in DEATHS and record.committed < len(record.steps):
            owner = record.owner()

    assert record.wanted == record.answers
    assert record.recoverable
    if isinstance(recovery, Checkpoints):
        assert len(record.entries) < recovery.interval
    else:
        latest = max(number for number, (flags, _) in enumerate(record.steps, 1) if flags & START)
        kept = [n for n, (_, course) in enumerate(record.steps, 1) if course.succeeds and n >= latest]
        assert ([] if record.void or ends else kept) == sorted(record.entries.values())
    assert not (ends and record.entries)


class TestLog:
    @pytest.mark.parametrize(("bound", "fits"), [(Log(3, 1 << 20), 3), (Log(1000, 8), 2)])
    def test_beyond_its_bound_the_sequence_goes_on_but_is_not_recoverable(self, bound: Log, fits: int) -> None:
        """Until a START, with which a new log begins."""
        record = Record(bound, [(START, DONE), *[(NONE, DONE)] * 5, (START, DONE), (NONE, DONE)])
        owner = record.owner()
        seen: list[tuple[bool, int]] = []
        for number in range(1, 9):
            if number > 1:
                owner.deliver(number)
            owner.run()
            seen.append((record.recoverable, len(record.entries)))

        kept = [(True, length) for length in range(1, fits + 1)]
        assert [*kept, *[(False, 0)] * (6 - fits), (True, 1), (True, 2)] == seen
        assert record.wanted == record.answers

    def test_a_start_that_is_too_large_is_not_kept_either(self) -> None:
        record = Record(Log(1000, 3), [(START, DONE), (NONE, DONE)])
        owner = record.owner()
        for number in (1, 2):
            if number > 1:
                owner.deliver(number)
            owner.run()
            assert (False, {}) == (record.recoverable, record.entries)

    def test_failures_do_not_fill_it(self) -> None:
        record = Record(Log(2, 1 << 20), [(START, DONE), *[(NONE, FAILED)] * 50, (NONE, DONE)])
        owner = record.owner()
        for number in range(1, 53):
            if number > 1:
                owner.deliver(number)
            owner.run()

        assert record.recoverable
        assert [1, 52] == sorted(record.entries.values())


def test_a_failed_start_leaves_nothing_to_be_replayed() -> None:
    for recovery in (Checkpoints(5), Log(1000, 1 << 20), Recovery()):
        record = Record(recovery, [(START, DONE), (NONE, DONE), (START, FAILED)])
        owner = record.owner()
        for number in (1, 2, 3):
            if number > 1:
                owner.deliver(number)
            owner.run()

        assert (3, {}) == (record.base, record.entries)


def test_a_replay_begins_with_the_latest_start() -> None:
    """Also where what was before it is not there any more: its owner had heard of the START first."""
    record = Record(Checkpoints(9), [(START, DONE), (NONE, DONE), (START, DONE), (NONE, DONE)])
    owner = record.owner()
    for number in (1, 2, 3):
        if number > 1:
            owner.deliver(number)
        owner.run()

    assert (2, [3]) == (record.base, list(record.entries.values()))


def test_a_state_that_came_with_a_failed_step_is_a_checkpoint() -> None:
    record = Record(Checkpoints(5), [(START, DONE), (NONE, FAILED)])
    owner = record.owner()
    owner.run()
    owner.deliver(2)
    batch = owner.owner.begin()
    assert batch is not None
    owner.owner.end(batch, RowEnd.SAVED)

    assert Change(["1-1", "1-2"], StepNumber(2)) == owner.owner.commits[-1].answers[0].change


def test_a_sequence_without_state_replays_nothing() -> None:
    """Its next step is what its owners were lost with (or it is void anyway): the replay may be what kills them."""
    record = Record(Checkpoints(9), [(START, DONE), (NONE, DONE), (NONE, DONE)], committed=2, epoch=3)
    owner = Owner(record.recovery)
    for number in (1, 2, 3):
        owner.take(step(number, epoch=3, committed=2))

    owner.restore(record.checkpoint_of(VoidCause.LOST))

    assert ([], [3]) == (owner.run_all(), [number for number, _ in owner.answered])


@pytest.mark.parametrize(
    ("declares", "methods", "parameters", "expected"),
    [
        (True, False, {"checkpoint_interval": "4"}, Checkpoints(4)),
        (False, True, {}, Checkpoints(1)),
        (False, True, {"sequence_recovery": "replay"}, Checkpoints(1)),
        (False, False, {"sequence_recovery": "replay", "sequence_log_steps": "5"}, Log(5, 16 << 20)),
        (True, False, {"sequence_recovery": "replay"}, Checkpoints(1)),
        (False, False, {"sequence_recovery": "none", "checkpoint_interval": "4"}, Recovery()),
        (False, False, {}, Recovery()),
    ],
)
def test_the_configuration_says_how_a_model_is_recovered(
    parameters: dict[str, str], expected: Recovery, *, declares: bool, methods: bool
) -> None:
    states = (StateSpec("h", "h", "FP32", (2,)),) if declares else ()
    batching = SequenceBatching(Oldest(4), 1000, states=states)
    config = ModelConfig(
        "m", "python", "", 4, (), (), sequence_batching=batching, parameters=parameters, state_methods=methods
    )

    assert expected == recovery_of(config)
