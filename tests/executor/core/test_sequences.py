"""Owned sequences: order comes from step numbers, ownership from epochs, whatever the order of arrival."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from executor.core.sequences import OwnedSequence, QueuedStep, Restored, SequenceTable, VoidCause
from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxOwned, InboxStep, InferMessage, StepFlag

SEQUENCE = SequenceId("m||i7")
MESSAGE = InferMessage("m", "1", "", 7, ())


def step(
    number: int,
    *,
    flags: StepFlag = StepFlag.NONE,
    epoch: int = 1,
    committed: int = 0,
    sequence: SequenceId = SEQUENCE,
    slot: int = 0,
) -> QueuedStep:
    inbox = InboxStep(
        entry=f"{epoch}-{number}",
        sequence=sequence,
        step=StepNumber(number),
        flags=flags,
        epoch=Epoch(epoch),
        instance=InstanceIndex(0),
        slot=SlotIndex(slot),
        committed=StepNumber(committed),
        version="1",
        gateway="g",
        token=str(number),
        message=b"",
    )
    return QueuedStep(inbox, MESSAGE, 0, None)


def found(*, checkpointed: int, committed: int, epoch: int = 1, void: VoidCause | None = None) -> Restored:
    return Restored(Epoch(epoch), StepNumber(checkpointed), StepNumber(committed), StepNumber(1), void)


def coming(*, epoch: int = 1, committed: int = 4, slot: int = 0) -> InboxOwned:
    return InboxOwned("9-9", SEQUENCE, Epoch(epoch), InstanceIndex(0), SlotIndex(slot), StepNumber(committed), "1")


def run_all(table: SequenceTable, owned: OwnedSequence) -> list[int]:
    """Runs every step that is ready; the order in which they ran."""
    ran: list[int] = []
    while (head := owned.head) is not None:
        assert head is table.begin(owned)
        ran.append(head.step.step)
        table.conclude(owned)
    return ran


def test_a_start_that_needs_no_state_may_run_at_once() -> None:
    owned = SequenceTable().accept(step(1, flags=StepFlag.START))

    assert owned is not None
    assert owned.head is not None
    assert not owned.restoring


def test_a_sequence_seen_in_the_middle_is_restored_before_anything_runs() -> None:
    table = SequenceTable()
    owned = table.accept(step(5, committed=4))
    assert owned is not None
    assert owned.restoring
    assert owned.head is None

    table.restored(SEQUENCE, found(checkpointed=4, committed=4))

    assert [5] == run_all(table, owned)


def test_steps_that_came_again_and_are_in_the_state_already_are_not_kept() -> None:
    """They would count as waiting for ever, and their requests be held."""
    table = SequenceTable()
    owned = queued_steps(table, 3, 4, 5)
    assert (3, 3) == (table.queued, table.waiting)

    restored = table.restored(SEQUENCE, replace(found(checkpointed=4, committed=4), traceparent="00-trace"))

    assert owned is restored
    assert [5] == list(owned.steps)
    assert "00-trace" == owned.predecessor
    table.begin(owned)
    assert (1, 0) == (table.queued, table.waiting)


def test_steps_between_checkpoint_and_commit_are_replayed() -> None:
    table = SequenceTable()
    for number in (4, 5, 3):
        table.accept(step(number, committed=4))

    owned = table.restored(SEQUENCE, found(checkpointed=2, committed=4))

    assert owned is not None
    assert StepNumber(4) == owned.replay_until
    assert [3, 4, 5] == run_all(table, owned)


def test_steps_that_failed_are_passed_over_when_others_are_replayed() -> None:
    """Their entries have left the inbox."""
    table = SequenceTable()
    for number in (4, 7, 9):
        table.accept(step(number, committed=8))
    failed = ((StepNumber(3), StepNumber(3)), (StepNumber(5), StepNumber(6)), (StepNumber(8), StepNumber(8)))

    owned = table.restored(SEQUENCE, replace(found(checkpointed=2, committed=8), failed=failed))

    assert owned is not None
    assert [4, 7, 9] == run_all(table, owned)


def test_what_redis_has_committed_does_not_run_again() -> None:
    table = SequenceTable()
    for number in (2, 3, 4):
        table.accept(step(number, committed=1))

    owned = table.restored(SEQUENCE, found(checkpointed=3, committed=3))

    assert owned is not None
    assert [4] == run_all(table, owned)


def test_an_older_epoch_is_stale_and_a_newer_one_begins_afresh() -> None:
    table = SequenceTable()
    table.accept(step(1, flags=StepFlag.START, epoch=5))

    assert table.accept(step(2, epoch=4)) is None
    newer = table.accept(step(3, epoch=9, committed=2))

    assert newer is not None
    assert newer.restoring
    assert [StepNumber(3)] == list(newer.steps)


def test_a_sequence_is_restored_before_its_first_step_has_come() -> None:
    table = SequenceTable()
    owned = table.expect(coming())
    assert owned is not None
    assert owned.restoring

    table.restored(SEQUENCE, found(checkpointed=3, committed=4))

    assert owned is table.accept(step(5, committed=4))
    assert [] == run_all(table, owned), "step 4 is to be replayed first, and is on its way"
    table.accept(step(4, committed=4))
    assert [4, 5] == run_all(table, owned)


def test_that_a_sequence_comes_is_heard_once_and_not_of_one_that_has_moved_on() -> None:
    table = SequenceTable()
    begun = table.accept(step(1, flags=StepFlag.START, epoch=5))
    assert begun is not None

    assert table.expect(coming(epoch=4)) is None
    assert table.expect(coming(epoch=5)) is None
    assert [1] == run_all(table, begun)
    newer = table.expect(coming(epoch=6, slot=2))

    assert newer is not None
    assert newer is table.get(SEQUENCE)
    assert newer is table.at(InstanceIndex(0), SlotIndex(2))
    assert table.at(InstanceIndex(0), SlotIndex(0)) is None
    assert table.expect(coming(epoch=6, slot=2)) is None


def test_a_sequence_that_is_said_to_come_does_not_drive_out_who_has_the_slot() -> None:
    table = SequenceTable()
    other = SequenceId("m||i8")
    present = table.accept(step(1, flags=StepFlag.START, sequence=other, epoch=3))

    assert table.expect(coming(epoch=2)) is not None
    assert present is table.at(InstanceIndex(0), SlotIndex(0))
    assert table.drop(SEQUENCE, Epoch(2)) is not None

    assert present is table.at(InstanceIndex(0), SlotIndex(0))


def test_a_step_that_comes_twice_runs_once() -> None:
    table = SequenceTable()
    owned = table.accept(step(1, flags=StepFlag.START))
    assert owned is not None

    assert table.accept(step(1, flags=StepFlag.START)) is None
    assert [1] == run_all(table, owned)
    assert table.accept(step(1)) is None


def test_who_comes_into_a_slot_drives_out_who_has_ended_there_when_redis_says_so() -> None:
    table = SequenceTable()
    table.accept(step(1, flags=StepFlag.START, slot=3))
    other = SequenceId("m||i8")

    newcomer = table.accept(step(1, flags=StepFlag.START, slot=3, sequence=other, epoch=2))
    assert newcomer is not None
    assert newcomer.restoring
    assert table.get(SEQUENCE) is table.at(InstanceIndex(0), SlotIndex(3))
    assert SEQUENCE == cast("OwnedSequence", table.seat(newcomer)).sequence
    assert table.seat(newcomer) is None
    table.restored(other, replace(found(checkpointed=0, committed=0, epoch=2), start_step=StepNumber(1)))

    assert table.get(SEQUENCE) is None
    assert newcomer is table.at(InstanceIndex(0), SlotIndex(3))
    assert not newcomer.taken_over
    assert [1] == run_all(table, newcomer)


def test_a_step_of_the_past_does_not_drive_out_who_has_the_slot_now() -> None:
    """It was left in the inbox when its sequence was taken away, and is read again."""
    table = SequenceTable()
    present = table.accept(step(1, flags=StepFlag.START, slot=3, epoch=2))
    other = SequenceId("m||i8")

    table.accept(step(1, flags=StepFlag.START, slot=3, sequence=other))
    table.drop(other, Epoch(1))

    assert table.get(SEQUENCE) is present
    assert present is table.at(InstanceIndex(0), SlotIndex(3))


def test_a_sequence_is_dropped_only_at_its_own_epoch() -> None:
    table = SequenceTable()
    table.accept(step(1, flags=StepFlag.START, epoch=5))

    assert table.drop(SEQUENCE, Epoch(4)) is None
    assert table.drop(SEQUENCE, Epoch(5)) is not None
    assert 0 == len(table)


def test_a_failed_start_voids_the_sequence_until_a_start_succeeds() -> None:
    table = SequenceTable()
    owned = table.accept(step(1, flags=StepFlag.START))
    table.accept(step(2, flags=StepFlag.START))
    assert owned is not None

    table.begin(owned)
    table.conclude(owned, failed_start=True)
    assert owned.void is VoidCause.FAILED

    table.begin(owned)
    table.conclude(owned, started=True)
    assert owned.void is None


def test_entries_stay_open_until_a_checkpoint_closes_all_of_them() -> None:
    table = SequenceTable()
    owned = table.accept(step(1, flags=StepFlag.START))
    table.accept(step(2))
    assert owned is not None

    run_all(table, owned)

    assert ["1-1", "1-2"] == owned.closed()
    assert [] == owned.open_entries


@given(
    order=st.permutations(range(1, 9)),
    repeats=st.lists(st.integers(1, 8), max_size=8),
    checkpointed=st.integers(0, 8),
    restored_after=st.integers(0, 16),
)
def test_steps_run_once_and_in_order_however_they_arrive(
    order: list[int], repeats: list[int], checkpointed: int, restored_after: int
) -> None:
    """Any order of arrival, any duplicates, and the restore at any moment give the same run."""
    table = SequenceTable()
    ran: list[int] = []
    arrivals = [*order, *repeats]
    for index, number in enumerate(arrivals):
        owned = table.accept(step(number, epoch=3, committed=8))
        if index == restored_after:
            table.restored(SEQUENCE, found(checkpointed=checkpointed, committed=8, epoch=3))
        if owned is not None:
            ran += run_all(table, owned)
    table.restored(SEQUENCE, found(checkpointed=checkpointed, committed=8, epoch=3))
    last = table.get(SEQUENCE)
    assert last is not None
    ran += run_all(table, last)

    assert list(range(checkpointed + 1, 9)) == ran


def test_a_step_that_is_repeated_stays_the_head_and_leaves_the_inbox_once() -> None:
    """The passes of an iterative model's step are one step: one entry, one step since the checkpoint, one START."""
    table = SequenceTable()
    owned = table.accept(step(1, flags=StepFlag.START))
    table.accept(step(2, committed=0))
    assert owned is not None

    for expected_passes in range(3):
        assert expected_passes == owned.passes
        assert 1 == table.begin(owned).step.step
        table.repeat(owned)
    table.begin(owned)
    table.conclude(owned, started=True)

    assert (0, 1) == (owned.passes, owned.start_step)
    assert ["1-1"] == owned.closed()
    assert [2] == run_all(table, owned)


def queued_steps(table: SequenceTable, *numbers: int) -> OwnedSequence:
    """A sequence whose steps wait, the START first."""
    for number in numbers:
        table.accept(step(number, flags=StepFlag.START if number == 1 else StepFlag.NONE))
    owned = table.get(SEQUENCE)
    assert owned is not None
    return owned


def test_a_cancelled_head_is_not_to_be_run_and_voids_what_is_behind_it() -> None:
    table = SequenceTable()
    owned = queued_steps(table, 1, 2)
    table.cancel(SEQUENCE, Epoch(1), StepNumber(1))
    assert owned.head_is_cancelled

    table.begin(owned)
    table.conclude(owned, dropped=VoidCause.CANCELLED)

    assert not owned.head_is_cancelled
    assert VoidCause.CANCELLED is owned.void


def test_a_cancelled_step_behind_others_is_looked_at_when_it_is_the_head() -> None:
    table = SequenceTable()
    owned = queued_steps(table, 1, 2, 3)
    table.cancel(SEQUENCE, Epoch(1), StepNumber(2))
    assert not owned.head_is_cancelled

    table.begin(owned)
    table.conclude(owned, started=True)

    assert owned.head_is_cancelled


def test_a_step_that_runs_is_not_disturbed_by_its_caller_leaving() -> None:
    table = SequenceTable()
    owned = queued_steps(table, 1, 2)
    table.begin(owned)
    table.cancel(SEQUENCE, Epoch(1), StepNumber(1))
    assert not owned.head_is_cancelled

    table.conclude(owned, started=True)

    assert [2] == run_all(table, owned)


def test_a_pass_whose_caller_left_meanwhile_is_the_last_one() -> None:
    table = SequenceTable()
    owned = queued_steps(table, 1)
    table.begin(owned)
    table.cancel(SEQUENCE, Epoch(1), StepNumber(1))

    table.repeat(owned)

    assert owned.head_is_cancelled


def test_a_cancellation_of_another_ownership_or_of_what_is_done_changes_nothing() -> None:
    table = SequenceTable()
    owned = queued_steps(table, 1, 2)
    table.begin(owned)
    table.conclude(owned, started=True)

    assert table.cancel(SEQUENCE, Epoch(2), StepNumber(2)) is None
    assert table.cancel(SEQUENCE, Epoch(1), StepNumber(1)) is None
    assert table.cancel(SequenceId("m||i8"), Epoch(1), StepNumber(2)) is None
    assert [2] == run_all(table, owned)


def test_a_step_that_was_cancelled_before_it_came_here_does_not_run() -> None:
    table = SequenceTable()
    queued = step(1, flags=StepFlag.START)
    cancelled = QueuedStep(msgspec.structs.replace(queued.step, cancelled=True), MESSAGE, 0, None)

    owned = table.accept(cancelled)

    assert owned is not None
    assert owned.head_is_cancelled
