"""A batch that is staged while another one runs: it takes nothing from anybody who comes later."""

from __future__ import annotations

from executor.core.actions import HowAnswered, RunBatch
from executor.core.events import OwnershipOver, RowEnd
from executor.core.sequence_batches import OldestSteps
from executor.core.state import OwnedPhase, QueuedStep
from shared.contract.ids import Epoch, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxCancelled, StepFlag
from shared.contract.model_config import Oldest
from tests.executor.core.owner import Owner, step

START = StepFlag.START
RAN, CANCELLED = HowAnswered.RAN, HowAnswered.CANCELLED


def name(number: int) -> SequenceId:
    return SequenceId(f"m||i{number}")


def callers(batch: RunBatch | None) -> list[SequenceId]:
    assert batch is not None
    return [member.owned.sequence for member in batch.members if member is not None]


def running(*, waiting: int) -> tuple[Owner, RunBatch]:
    """Two sequences run, in all rows that there are; so many others wait."""
    owner = Owner(rows=2)
    for number in range(2):
        owner.take(step(1, flags=START, sequence=name(number), slot=number))
    batch = owner.begin()
    assert batch is not None
    for number in range(2, 2 + waiting):
        owner.take(step(1, flags=START, sequence=name(number), slot=number))
    return owner, batch


def test_a_full_batch_of_others_is_staged_and_whoever_comes_later_runs_behind_it() -> None:
    owner, first = running(waiting=2)

    staged = owner.stage()

    assert [name(2), name(3)] == callers(staged)
    owner.take(step(2, sequence=name(0), slot=0))
    owner.end(first)
    owner.take(step(2, sequence=name(1), slot=1))
    assert [name(0), name(1)] == callers(owner.stage())


def test_a_row_that_is_free_is_kept_for_who_comes_until_the_running_batch_ends() -> None:
    owner, first = running(waiting=1)
    assert owner.stage() is None

    owner.take(step(2, sequence=name(0), slot=0))
    owner.end(first)

    assert [name(2), name(0)] == callers(owner.begin())


def test_a_step_behind_one_that_runs_is_not_staged() -> None:
    owner, _ = running(waiting=1)
    owner.take(step(2, sequence=name(0), slot=0))

    assert owner.stage() is None


def test_a_step_whose_caller_leaves_while_it_is_staged_runs_on_but_is_not_repeated() -> None:
    owner, first = running(waiting=2)
    staged = owner.stage()
    assert staged is not None

    for number in (2, 3):
        owner.take(InboxCancelled("9-9", name(number), Epoch(1), StepNumber(1)))
    owner.end(first)
    assert [RAN, RAN] == [how for _, how in owner.answered]
    owner.end(staged, RowEnd.DONE, RowEnd.AGAIN)

    assert [RAN, RAN, RAN, CANCELLED] == [how for _, how in owner.answered]


def test_a_sequence_that_leaves_while_it_is_staged_is_not_answered_and_its_slot_has_a_new_one() -> None:
    owner, first = running(waiting=2)
    staged = owner.stage()
    assert staged is not None

    owner.take(OwnershipOver(name(2), Epoch(1)))
    owner.take(step(1, flags=START, sequence=name(9), slot=2))
    owner.end(first)
    owner.end(staged)

    answered = [one.queued.step.sequence for commit in owner.commits for one in commit.answers]
    assert [name(0), name(1), name(3)] == answered
    assert OwnedPhase.READY is owner.owned(name(9)).phase
    assert [name(9)] == callers(owner.begin())


def test_a_preferred_size_with_a_delay_does_not_keep_a_full_batch_from_being_staged() -> None:
    steps = OldestSteps[QueuedStep](Oldest(0, max_queue_delay_us=1000, preferred_batch_sizes=(1,)), 2)
    for number in range(2):
        waiting = step(1, flags=START, sequence=name(number), slot=number)
        steps.offer(SlotIndex(number), waiting, arrived_us=0, now_us=0)

    assert 2 == len(steps.full(1) or ())
