"""Steps of decoupled models: a step stays open behind its batch, and the next one waits until it is final."""

from __future__ import annotations

from executor.core.actions import BatchMember, Commit, HowAnswered, RunBatch
from executor.core.events import BatchDone, OwnershipOver, RowEnd, StepEnded, StepsFinal
from executor.core.recovery import Log
from executor.core.state import Checkpoint, OwnedPhase
from shared.contract.ids import Epoch, StepNumber
from shared.contract.messages import StepFlag
from tests.executor.core.owner import SEQUENCE, Owner, step


def started(owner: Owner, steps: int = 2) -> RunBatch:
    """A sequence with so many steps; its first one runs."""
    owner.state.one_by_one = True
    for number in range(1, steps + 1):
        owner.take(step(number, flags=StepFlag.START if number == 1 else StepFlag.NONE))
    batch = owner.begin()
    assert batch is not None
    return batch


def left_open(owner: Owner) -> BatchMember:
    """The first of two steps: its batch has ended and left it open."""
    batch = started(owner)
    (member,) = batch.members
    assert member is not None
    owner.take(BatchDone(batch, [RowEnd.OPEN]))
    return member


def test_a_step_stays_open_until_its_last_answer() -> None:
    owner = Owner()
    batch = started(owner)
    (member,) = batch.members
    assert member is not None

    opened = owner.take(BatchDone(batch, [RowEnd.OPEN]))

    # The batch is counted, and nothing is answered.
    assert [(True, [])] == [(one.batch, list(one.answers)) for one in opened if isinstance(one, Commit)]
    assert OwnedPhase.RUNNING is owner.owned().phase
    owner.take(StepEnded(member, RowEnd.DONE))
    assert [(1, HowAnswered.RAN)] == owner.answered


def test_the_next_step_begins_when_the_one_before_is_final() -> None:
    owner = Owner()
    member = left_open(owner)
    owner.take(StepEnded(member, RowEnd.DONE))

    assert owner.begin() is None
    owner.take(StepsFinal([(SEQUENCE, Epoch(1), StepNumber(1))]))
    following = owner.begin()

    assert following is not None
    assert [2] == [one.queued.step.step for one in following.members if one is not None]


def test_while_a_step_waits_for_the_commit_of_the_one_before_there_is_more_to_do() -> None:
    """A load that is replaced would else end with steps that it has accepted."""
    owner = Owner()
    member = left_open(owner)
    owner.take(StepEnded(member, RowEnd.DONE))

    assert owner.state.is_busy
    owner.take(StepsFinal([(SEQUENCE, Epoch(1), StepNumber(1))]))
    assert [2] == owner.run()
    assert not owner.state.is_busy


def test_while_a_suspected_step_waits_for_the_commit_of_the_one_before_there_is_more_to_do() -> None:
    owner = Owner()
    for number, flags in ((1, StepFlag.START), (2, StepFlag.NONE)):
        owner.take(step(number, flags=flags, suspicion=number - 1))

    assert [1] == owner.run()

    assert owner.begin() is None
    assert owner.state.is_busy


def test_the_end_of_a_step_whose_sequence_was_dropped_changes_nothing() -> None:
    owner = Owner()
    member = left_open(owner)
    owner.take(OwnershipOver(SEQUENCE, Epoch(1)))

    assert [] == owner.take(StepEnded(member, RowEnd.DONE))
    assert [] == owner.answered


def test_a_pass_that_is_repeated_leaves_the_step_to_the_next_pass() -> None:
    owner = Owner()
    batch = started(owner, steps=1)

    owner.take(BatchDone(batch, [RowEnd.AGAIN]))
    again = owner.begin()

    assert again is not None
    (member,) = again.members
    assert member is not None
    owner.take(BatchDone(again, [RowEnd.OPEN]))
    owner.take(StepEnded(member, RowEnd.FAILED))
    assert [(1, HowAnswered.RAN)] == owner.answered


def test_a_step_that_was_replayed_is_final_at_once() -> None:
    """It was committed before: nobody will tell that it is."""
    owner = Owner(Log(1000, 1 << 20))
    owner.state.one_by_one = True
    for number in (1, 2):
        owner.take(step(number, flags=StepFlag.START if number == 1 else StepFlag.NONE, committed=1))
    owner.restore(Checkpoint(Epoch(1), StepNumber(0), StepNumber(1), StepNumber(1), None))

    replay = owner.begin()
    assert replay is not None
    (member,) = replay.members
    assert member is not None
    owner.take(BatchDone(replay, [RowEnd.OPEN]))
    owner.take(StepEnded(member, RowEnd.DONE))

    assert [] == owner.commits, "neither answered nor counted again"
    assert [2] == owner.run()


def test_a_further_pass_of_a_replayed_step_is_not_counted_again() -> None:
    owner = Owner(Log(1000, 1 << 20))
    for number in (1, 2):
        owner.take(step(number, flags=StepFlag.START if number == 1 else StepFlag.NONE, committed=1))
    owner.restore(Checkpoint(Epoch(1), StepNumber(0), StepNumber(1), StepNumber(1), None))

    assert [1, 1] == owner.run(RowEnd.AGAIN) + owner.run()
    assert [] == owner.commits
    assert [2] == owner.run(RowEnd.AGAIN)
    assert [(True, [])] == [(one.batch, list(one.answers)) for one in owner.commits]
