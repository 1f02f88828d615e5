"""Owned sequences: order comes from step numbers, ownership from epochs, whatever the order of arrival."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.actions import Describe, HowAnswered, LoadState, Release, Remove, Tell
from executor.core.batching import Wait
from executor.core.decide import next_batch
from executor.core.events import (
    BatchDone,
    CheckpointFetched,
    OwnershipOver,
    RowEnd,
    StateLoaded,
    StepsFinal,
    SuspectTried,
)
from executor.core.recovery import Checkpoints
from executor.core.sequence_batches import DirectSteps, OldestSteps
from executor.core.state import OWNED_MOVES, OwnedPhase, OwnedSequence, QueuedStep, VoidCause
from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxCancelled, InboxExpired, InboxVacated, StepFlag
from shared.contract.model_config import Direct, Oldest
from tests.executor.core.owner import SEQUENCE, Owner, coming, found, step

START, END = StepFlag.START, StepFlag.END
OTHER = SequenceId("m||i8")
RAN, VOID, CANCELLED = HowAnswered.RAN, HowAnswered.VOID, HowAnswered.CANCELLED
GIVEN_UP = HowAnswered.GIVEN_UP


def queued(*numbers: int) -> Owner:
    """A sequence whose steps wait, the START first."""
    owner = Owner()
    for number in numbers:
        owner.take(step(number, flags=START if number == 1 else StepFlag.NONE))
    return owner


def sitting(owner: Owner, slot: int) -> SequenceId | None:
    owned = owner.state.by_slot.get((InstanceIndex(0), SlotIndex(slot)))
    return owned.sequence if owned is not None else None


FOLLOWER = SequenceId("m|@e//2#5-0.1|i7")
"""In an ensemble it does what another sequence has done."""


def cancelled(number: int, *, epoch: int = 1, sequence: SequenceId = SEQUENCE) -> InboxCancelled:
    return InboxCancelled("9-9", sequence, Epoch(epoch), StepNumber(number))


def test_the_moves_lead_everywhere_and_back() -> None:
    assert set(OwnedPhase) == set(OWNED_MOVES.values()) == {phase for phase, _ in OWNED_MOVES}


def test_a_move_that_is_not_legal_is_refused() -> None:
    owned = OwnedSequence(
        SEQUENCE, Epoch(1), InstanceIndex(0), SlotIndex(0), StepNumber(1), StepNumber(1), StepNumber(0)
    )

    with pytest.raises(AssertionError, match="'begun' while absent"):
        Owner().state.move(owned, "begun")


class TestArrival:
    def test_a_start_that_needs_no_state_runs_at_once(self) -> None:
        assert [1] == queued(1).run()

    def test_a_sequence_seen_in_the_middle_is_restored_before_anything_runs(self) -> None:
        owner = Owner()
        owner.take(step(5, committed=4))
        assert [] == owner.run()

        owner.restore(found(checkpointed=4, committed=4))

        assert [5] == owner.run_all()

    def test_a_start_that_an_earlier_load_may_have_committed_is_replayed_as_the_record_says(self) -> None:
        """Begun at once, it would wait for the step that failed, which lies nowhere any more."""
        owner = Owner()
        for number, flags in ((1, START), (3, StepFlag.NONE), (4, StepFlag.NONE)):
            owner.take(msgspec.structs.replace(step(number, flags=flags), is_older=True))
        assert [] == owner.run()

        failed = ((StepNumber(2), StepNumber(2)),)
        owner.restore(replace(found(checkpointed=0, committed=3), failed=failed))

        assert [1, 3, 4] == owner.run_all()
        assert [(4, RAN)] == owner.answered

    def test_nothing_runs_before_the_engine_has_the_state(self) -> None:
        owner = Owner()
        owner.take(step(5, committed=4))
        (owned,) = owner.state.next_fetches(64, 16)
        (load,) = owner.take(CheckpointFetched(owned, found(checkpointed=4, committed=4)))
        assert isinstance(load, LoadState)
        assert [] == owner.run()

        owner.take(StateLoaded(owned))

        assert [5] == owner.run_all()

    def test_a_state_that_the_engine_cannot_take_is_lost(self) -> None:
        owner = Owner()
        owner.take(step(5, committed=4))
        owned = owner.owned()
        owner.take(CheckpointFetched(owned, found(checkpointed=4, committed=4)))

        owner.take(StateLoaded(owned, is_usable=False))

        assert [(5, VOID)] == owner.answered
        assert VoidCause.LOST is owner.commits[0].answers[0].cause

    def test_a_load_of_an_earlier_ownership_does_not_count_for_a_later_one_of_the_same_epoch(self) -> None:
        """The sequence was dropped when a commit was refused, and its entries were read again."""
        owner = Owner()
        owner.take(step(5, committed=4))
        before = owner.owned()
        owner.take(CheckpointFetched(before, found(checkpointed=4, committed=4)))
        owner.take(OwnershipOver(SEQUENCE, Epoch(1)))
        owner.take(step(5, committed=4))

        owner.take(StateLoaded(before, is_usable=False))
        assert OwnedPhase.FETCHING is owner.owned().phase
        owner.restore(found(checkpointed=4, committed=4))

        assert [5] == owner.run_all()

    def test_steps_that_came_again_and_are_in_the_state_already_are_not_kept(self) -> None:
        """They would count as waiting for ever, and their requests be held."""
        owner = Owner()
        for number in (3, 4, 5):
            owner.take(step(number, committed=4, message=b"1234"))
        assert (3, 3, 12) == (owner.state.queued, owner.state.waiting, owner.state.queued_bytes)

        owner.restore(replace(found(checkpointed=4, committed=4), traceparent="00-trace"))

        assert [5] == list(owner.owned().steps)
        assert "00-trace" == owner.owned().predecessor
        owner.begin()
        assert (1, 0, 4) == (owner.state.queued, owner.state.waiting, owner.state.queued_bytes)

    def test_steps_between_checkpoint_and_commit_are_replayed_and_not_answered(self) -> None:
        owner = Owner()
        for number in (4, 5, 3):
            owner.take(step(number, committed=4))

        owner.restore(found(checkpointed=2, committed=4))

        assert [3, 4, 5] == owner.run_all()
        assert [(5, RAN)] == owner.answered

    @pytest.mark.parametrize(("start", "number"), [(3, 3), (6, 0)])
    def test_steps_are_numbered_on_from_the_latest_committed_start(self, start: int, number: int) -> None:
        """A START that is only accepted counts when it runs."""
        owner = Owner()
        owner.take(step(5, committed=4))

        owner.restore(replace(found(checkpointed=4, committed=4), start_step=StepNumber(start)))
        owner.run()

        assert number == owner.commits[0].answers[0].number

    def test_steps_that_failed_are_passed_over_when_others_are_replayed(self) -> None:
        """Their entries have left the inbox."""
        owner = Owner()
        for number in (4, 7, 9):
            owner.take(step(number, committed=8))
        failed = ((StepNumber(3), StepNumber(3)), (StepNumber(5), StepNumber(6)), (StepNumber(8), StepNumber(8)))

        owner.restore(replace(found(checkpointed=2, committed=8), failed=failed))

        assert [4, 7, 9] == owner.run_all()

    def test_a_replayed_step_that_fails_now_loses_the_state(self) -> None:
        """Later steps would build on another state than their caller knows."""
        owner = Owner()
        for number in (3, 4):
            owner.take(step(number, committed=3))
        owner.restore(found(checkpointed=2, committed=3))

        assert [3] == owner.run(RowEnd.FAILED)

        assert [(4, VOID)] == owner.answered
        assert VoidCause.LOST is owner.owned().void

    def test_what_redis_has_committed_does_not_run_again(self) -> None:
        owner = Owner()
        for number in (2, 3, 4):
            owner.take(step(number, committed=1))

        owner.restore(found(checkpointed=3, committed=3))

        assert [4] == owner.run_all()

    def test_an_older_epoch_is_stale_and_a_newer_one_begins_afresh(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, epoch=5))

        (stale,) = owner.take(step(2, epoch=4))
        assert isinstance(stale, Tell)
        assert [Release(InstanceIndex(0), SEQUENCE, SlotIndex(0))] == owner.take(step(3, epoch=9, committed=2))

        assert [StepNumber(3)] == list(owner.owned().steps)
        assert [] == owner.run()

    def test_a_sequence_is_restored_before_its_first_step_has_come(self) -> None:
        owner = Owner()
        owner.take(coming())
        owner.restore(found(checkpointed=3, committed=4))

        owner.take(step(5, committed=4))
        assert [] == owner.run_all(), "step 4 is to be replayed first, and is on its way"
        owner.take(step(4, committed=4))
        assert [4, 5] == owner.run_all()

    def test_that_a_sequence_comes_is_heard_once_and_not_of_one_that_has_moved_on(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, epoch=5))

        assert [] == owner.take(coming(epoch=4))
        assert [] == owner.take(coming(epoch=5))
        assert [1] == owner.run_all()
        owner.take(coming(epoch=6, slot=2))

        assert (6, SEQUENCE, None) == (owner.owned().epoch, sitting(owner, 2), sitting(owner, 0))
        assert [] == owner.take(coming(epoch=6, slot=2))

    def test_a_sequence_without_a_record_or_of_another_owner_is_dropped(self) -> None:
        for checkpoint in (None, found(checkpointed=4, committed=4, epoch=2)):
            owner = Owner()
            owner.take(step(5, committed=4))
            owner.restore(checkpoint)
            assert 0 == len(owner.state)
            assert [] == owner.removed

    def test_the_entries_of_a_sequence_that_is_over_leave_the_inbox(self) -> None:
        owner = Owner()
        owner.take(step(5, committed=4))
        owner.restore(replace(found(checkpointed=4, committed=5), is_over=True))

        assert (0, ["1-5"]) == (len(owner.state), owner.removed)

    @pytest.mark.parametrize(
        ("checkpointed", "starts", "is_lost"),
        [(4, (1,), True), (4, (1, 7), True), (3, (1,), True), (3, (4,), False), (3, (4, 7), False), (0, (1,), False)],
    )
    def test_a_state_that_was_checkpointed_and_is_gone_is_lost(
        self, checkpointed: int, starts: tuple[int, ...], *, is_lost: bool
    ) -> None:
        """Else the next step would run as if the sequence began with it. A START needs no state, and is not final yet
        when it is the seventh.
        """
        owner = Owner(Checkpoints(5))
        for number in range(checkpointed + 1, 8):
            owner.take(step(number, committed=4, flags=START if number in starts else StepFlag.NONE))
        gone = replace(found(checkpointed=checkpointed, committed=4), model_state=None)

        owner.restore(replace(gone, start_step=StepNumber(starts[-1])))
        ran = owner.run_all()

        assert is_lost == ((5, VOID) in owner.answered)
        assert is_lost == (5 not in ran)
        assert (not is_lost or 7 in starts) == (7 in ran)

    def test_sequences_with_a_step_that_waits_are_fetched_first(self) -> None:
        owner = Owner()
        owner.take(coming())
        owner.take(step(5, committed=4, sequence=OTHER, slot=1))

        assert [[OTHER], [SEQUENCE], []] == [[o.sequence for o in owner.state.next_fetches(9, 9)] for _ in range(3)]


class TestLeaving:
    """Where slots are places for states, a few are kept free: here 2 of 5."""

    @staticmethod
    def used(owner: Owner, *numbers: int) -> None:
        """Each of these sequences has its next step, which is made final."""
        for number in numbers:
            name = SequenceId(f"m||i{number}")
            owned = owner.state.by_id.get(name)
            last = owned.committed if owned else StepNumber(0)
            flags = StepFlag.NONE if last else StepFlag.START
            owner.take(step(last + 1, flags=flags, committed=last, sequence=name, slot=number))
            owner.run()
            owner.take(StepsFinal([(name, Epoch(1), StepNumber(last + 1))]))

    @staticmethod
    def crowded() -> Owner:
        owner = Owner(slots=5, spare=2)
        TestLeaving.used(owner, 1, 2, 3, 4)
        return owner

    def leaving(self, owner: Owner, most: int = 9) -> list[str]:
        return [owned.sequence for owned in owner.state.next_leaving(most)]

    def test_while_half_of_the_spare_slots_are_free_nobody_leaves(self) -> None:
        owner = self.crowded()

        assert (False, []) == (owner.state.is_crowded, self.leaving(owner))

    def test_then_those_leave_that_were_used_least_recently(self) -> None:
        owner = self.crowded()
        self.used(owner, 1, 5)

        assert ["m||i2", "m||i3"] == self.leaving(owner)

    def test_who_is_taken_out_and_stays_comes_back_with_its_next_step(self) -> None:
        owner = self.crowded()
        self.used(owner, 5)
        assert ["m||i1"] == self.leaving(owner, 1)

        self.used(owner, 1)

        assert ["m||i2", "m||i3"] == self.leaving(owner)

    def test_who_has_a_step_or_an_answer_that_is_not_final_stays(self) -> None:
        owner = self.crowded()
        self.used(owner, 5)
        owner.take(step(2, committed=1, sequence=SequenceId("m||i1"), slot=1))
        owner.take(step(2, committed=1, sequence=SequenceId("m||i2"), slot=2))
        owner.run()
        owner.take(step(2, committed=1, sequence=SequenceId("m||i3"), slot=3))

        assert ["m||i4", "m||i5"] == self.leaving(owner)
        assert [] == self.leaving(owner)

    def test_who_has_steps_since_its_checkpoint_stays(self) -> None:
        owner = Owner(Checkpoints(2), slots=5, spare=2)
        self.used(owner, 1, 2, 3, 4, 5)
        self.used(owner, 3)

        assert ["m||i3"] == self.leaving(owner)

    def test_who_has_come_without_a_step_may_leave(self) -> None:
        owner = self.crowded()
        owner.take(coming())
        assert [2, 2, 0] == [len(self.leaving(owner)) for _ in range(3)], "its state is not here yet"
        assert not owner.state.is_crowded

        owner.restore(found(checkpointed=4, committed=4))

        assert [SEQUENCE] == self.leaving(owner)

    def test_who_has_left_is_not_asked_again(self) -> None:
        owner = self.crowded()
        self.used(owner, 5)
        owner.take(OwnershipOver(SequenceId("m||i1"), Epoch(1)))
        owner.take(OwnershipOver(SequenceId("m||i2"), Epoch(1)))

        assert [] == self.leaving(owner)

    def test_without_spare_slots_nobody_leaves(self) -> None:
        owner = Owner(slots=5)
        self.used(owner, 1, 2, 3, 4, 5)

        assert (False, 0, []) == (owner.state.is_crowded, len(owner.state.idle), self.leaving(owner))


class TestSlots:
    def test_a_sequence_that_is_said_to_come_does_not_drive_out_who_has_the_slot(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, sequence=OTHER, epoch=3))
        owner.take(coming(epoch=2))

        owner.take(InboxVacated("9-9", SEQUENCE, Epoch(2)))

        assert OTHER == sitting(owner, 0)
        assert [1] == owner.run_all()

    def test_who_comes_into_a_slot_drives_out_who_has_ended_there_when_redis_says_so(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, slot=3))
        owner.take(step(1, flags=START, slot=3, sequence=OTHER, epoch=2))
        assert SEQUENCE == sitting(owner, 3)

        owner.restore(found(checkpointed=0, committed=0, epoch=2), OTHER)

        assert (OTHER, [OTHER]) == (sitting(owner, 3), list(owner.state.by_id))
        assert owner.owned(OTHER).predecessor is None
        assert [1] == owner.run_all()

    def test_a_step_of_the_past_does_not_drive_out_who_has_the_slot_now(self) -> None:
        """It was left in the inbox when its sequence was taken away, and is read again."""
        owner = Owner()
        owner.take(step(1, flags=START, slot=3, epoch=2))
        owner.take(step(1, flags=START, slot=3, sequence=OTHER))
        owner.restore(None, OTHER)

        assert SEQUENCE == sitting(owner, 3)
        assert [1] == owner.run_all()

    def test_the_ready_step_of_a_dropped_sequence_leaves_its_slot(self) -> None:
        owner = queued(1)
        owner.take(OwnershipOver(SEQUENCE, Epoch(1)))

        assert [] == owner.run()
        assert (0, 0) == (owner.state.queued, len(owner.state.ready[0]))

    def test_a_sequence_is_dropped_only_at_its_own_epoch(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, epoch=5))

        assert [] == owner.take(OwnershipOver(SEQUENCE, Epoch(4)))
        assert [Release(InstanceIndex(0), SEQUENCE, SlotIndex(0))] == owner.take(OwnershipOver(SEQUENCE, Epoch(5)))

    def test_a_sequence_that_gives_up_its_slot_is_forgotten_with_what_is_to_be_fetched_for_it(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START))
        owner.run()
        owner.take(step(5, sequence=OTHER, slot=1, committed=4))

        tell, release = owner.take(InboxVacated("9-9", SEQUENCE, Epoch(1)))
        assert isinstance(tell, Tell)
        assert ({"last_step": 1}, Release(InstanceIndex(0), SEQUENCE, SlotIndex(0))) == (tell.fields, release)
        assert [] == owner.take(InboxVacated("9-9", SEQUENCE, Epoch(1)))
        owner.take(InboxVacated("9-9", OTHER, Epoch(1)))
        assert ([], 0) == (owner.state.next_fetches(9, 9), len(owner.state))

    def test_a_sequence_that_expires_is_described_and_its_entries_leave_the_inbox(self) -> None:
        owner = Owner(Checkpoints(9))
        for number in (1, 2):
            owner.take(step(number, flags=START if number == 1 else StepFlag.NONE))
        owner.run_all()
        owned = owner.owned()

        describe, release, remove = owner.take(InboxExpired("9-9", SEQUENCE, Epoch(1)))

        assert isinstance(describe, Describe)
        assert (owned, 2) == (describe.owned, describe.last_step)
        assert (Release(InstanceIndex(0), SEQUENCE, SlotIndex(0)), Remove(["1-1", "1-2"])) == (release, remove)

    def test_a_sequence_that_was_dropped_while_its_batch_ran_is_not_answered(self) -> None:
        owner = queued(1)
        batch = owner.begin()
        assert batch is not None
        owner.take(OwnershipOver(SEQUENCE, Epoch(1)))
        # Its entry was read again meanwhile.
        owner.take(step(1, flags=START))

        owner.end(batch)

        assert [] == owner.answered
        assert [1] == owner.run_all()

    def test_one_that_was_ended_is_not_described_as_expired(self) -> None:
        owner = Owner(Checkpoints(9))
        owner.take(step(1, flags=START))
        owner.run_all()

        actions = owner.take(InboxExpired("9-9", SEQUENCE, Epoch(1), ended=True))

        assert [Release(InstanceIndex(0), SEQUENCE, SlotIndex(0)), Remove(["1-1"])] == actions

    def test_one_that_expires_before_its_state_has_come_is_not_described(self) -> None:
        """Its slot holds what another sequence has left there."""
        owner = Owner()
        owner.take(coming())

        actions = owner.take(InboxExpired("9-9", SEQUENCE, Epoch(1)))

        assert not any(isinstance(action, Describe) for action in actions)
        assert 0 == len(owner.state)


class TestSteps:
    def test_a_step_that_comes_twice_runs_once(self) -> None:
        owner = queued(1, 1)
        assert [1] == owner.run_all()

        owner.take(step(1))

        assert [] == owner.run_all()

    def test_a_failed_start_voids_the_sequence_until_a_start_succeeds(self) -> None:
        owner = queued(1, 2)
        owner.take(step(3, flags=START))

        assert [1] == owner.run(RowEnd.FAILED)
        assert VoidCause.FAILED is owner.owned().void
        assert [3] == owner.run()

        assert owner.owned().void is None
        assert [(1, RAN), (2, VOID), (3, RAN)] == owner.answered

    def test_a_failed_step_voids_a_sequence_that_follows_another(self) -> None:
        owner = Owner()
        for number in (1, 2, 3):
            owner.take(step(number, flags=START if number == 1 else StepFlag.NONE, sequence=FOLLOWER))
        assert [1] == owner.run()

        assert [2] == owner.run(RowEnd.FAILED)

        assert [(1, RAN), (2, RAN), (3, VOID)] == owner.answered

    def test_the_commits_of_a_batch_come_before_those_of_steps_that_need_no_model(self) -> None:
        owner = queued(1, 2)
        owner.run(RowEnd.LOST)

        assert [[(1, RAN)], [(2, VOID)]] == [[(a.queued.step.step, a.how) for a in c.answers] for c in owner.commits]

    def test_a_step_that_the_model_cannot_take_fails_without_it(self) -> None:
        owner = Owner()
        one = step(1, flags=START)
        owner.take(type(one)(one.step, one.message, 0, None, refused=True))
        owner.take(step(2))

        assert [(1, HowAnswered.REFUSED), (2, VOID)] == owner.answered
        assert VoidCause.FAILED is owner.owned().void

    def test_a_step_that_is_repeated_stays_the_next_and_leaves_the_inbox_once(self) -> None:
        """The passes of an iterative model's step are one step: one entry, one step since the checkpoint, one START."""
        owner = queued(1, 2)
        for expected_passes in range(3):
            assert expected_passes == owner.owned().passes
            assert [1] == owner.run(RowEnd.AGAIN)
            assert [] == owner.answered
        assert [1] == owner.run()

        (answer,) = owner.commits[-1].answers
        assert (["1-1"], 1, 0) == (answer.change.entries, answer.number, owner.owned().passes)
        assert [2] == owner.run_all()

    def test_a_further_pass_waits_since_the_pass_before_it(self) -> None:
        owner = Owner()
        strategy = Direct(max_queue_delay_us=100, minimum_slot_utilization=1.0)
        owner.state.ready = [DirectSteps[QueuedStep](strategy, 4)]
        owner.take(step(1, flags=START))
        owner.now_us = 1000
        assert [1] == owner.run(RowEnd.AGAIN)
        ended_us = owner.now_us

        wait = next_batch(owner.state, InstanceIndex(0), ended_us, was_busy=False)

        assert Wait(ended_us + 100 + 1) == wait

    def test_only_the_first_traced_step_behind_a_takeover_names_the_predecessor(self) -> None:
        owner = Owner()
        for number in (5, 6, 7):
            one = step(number, committed=4)
            traced = type(one.message)("m", "1", "", 7, (), traceparent="00-own" if number > 5 else "")
            owner.take(type(one)(one.step, traced, 0, None))
        owner.restore(replace(found(checkpointed=4, committed=4), traceparent="00-before"))
        owner.run_all()

        predecessors = [answer.predecessor for commit in owner.commits for answer in commit.answers]
        assert [None, "00-before", None] == predecessors

    @given(
        order=st.permutations(range(1, 9)),
        repeats=st.lists(st.integers(1, 8), max_size=8),
        checkpointed=st.integers(0, 8),
        restored_after=st.integers(0, 15),
    )
    def test_steps_run_once_and_in_order_however_they_arrive(
        self, order: list[int], repeats: list[int], checkpointed: int, restored_after: int
    ) -> None:
        """Any order of arrival, any duplicates, and the restore at any moment give the same run."""
        owner = Owner()
        ran: list[int] = []
        arrivals = [*order, *repeats]
        for index, number in enumerate(arrivals):
            owner.take(step(number, epoch=3, committed=8))
            if index == min(restored_after, len(arrivals) - 1):
                owner.restore(found(checkpointed=checkpointed, committed=8, epoch=3))
            ran += owner.run_all()

        assert list(range(checkpointed + 1, 9)) == ran
        assert [] == owner.answered
        assert 0 == owner.state.queued

    def test_an_executor_is_busy_while_a_step_runs_or_may_soon_and_not_for_sequences_at_rest(self) -> None:
        owner = queued(1)
        owner.state.ready = [*owner.state.ready, OldestSteps[QueuedStep](Oldest(0), 4)]
        assert owner.state.is_busy, "one of two instances has a step"
        batch = owner.begin()
        assert batch is not None
        assert owner.state.is_busy

        owner.end(batch)

        assert not owner.state.is_busy
        owner.take(step(5, sequence=OTHER, slot=1, committed=4))
        assert owner.state.is_busy, "its state is on the way"

    def test_steps_behind_an_end_wait_for_a_slot_in_the_order_in_which_their_runs_began(self) -> None:
        """Another slot is free for the run that began first, however late its last step came."""
        owner = Owner()
        arrivals = [
            (SEQUENCE, 1, 0),
            (SEQUENCE, 2, 0),
            (SEQUENCE, 3, 1),
            (OTHER, 1, 0),
            (OTHER, 2, 5),
            (SEQUENCE, 4, 9),
        ]
        for sequence, number, queued_us in arrivals:
            is_end = (sequence, number) in {(SEQUENCE, 2), (OTHER, 1)}
            flags = (START if number == 1 else StepFlag.NONE) | (END if is_end else StepFlag.NONE)
            one = step(number, flags=flags, sequence=sequence, slot=int(sequence == OTHER))
            owner.take(QueuedStep(one.step, one.message, queued_us, None))

        assert [3, 1, 0] == [owner.state.behind_ends(slots) for slots in (2, 3, 4)]


class TestEntries:
    def test_entries_stay_until_a_checkpoint_covers_all_of_them(self) -> None:
        owner = Owner(Checkpoints(3))
        for number in (1, 2, 3):
            owner.take(step(number, flags=START if number == 1 else StepFlag.NONE))

        assert [1, 2, 3] == owner.run_all()

        changes = [commit.answers[0].change for commit in owner.commits]
        assert [[], [], ["1-1", "1-2", "1-3"]] == [list(change.entries) for change in changes]
        assert [0, 0, 3] == [change.base for change in changes]

    def test_an_entry_from_before_a_start_goes_with_the_commit_of_that_start_or_after_it(self) -> None:
        owner = Owner(Checkpoints(3))
        owner.take(step(5, flags=START, committed=4))
        owner.take(step(3, committed=4))
        assert [] == owner.removed
        owner.run()
        assert ["1-3"] == owner.commits[-1].answers[0].change.entries

        owner.take(StepsFinal([(SEQUENCE, Epoch(1), StepNumber(5))]))
        owner.take(step(4, committed=4))

        assert ["1-4"] == owner.removed

    def test_an_entry_from_before_a_start_that_runs_does_not_make_it_a_checkpoint(self) -> None:
        """The state was not asked for when the batch began, so the commit must not say that Redis holds it."""
        owner = Owner(Checkpoints(2))
        owner.take(step(5, flags=START, committed=4))
        batch = owner.begin()
        assert batch is not None
        (member,) = batch.members
        assert member is not None
        assert not member.save
        owner.take(step(3, committed=4))

        owner.end(batch)

        assert 4 == owner.commits[-1].answers[0].change.base


class TestSuspects:
    def test_a_suspected_sequence_waits_for_its_turn(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, suspicion=2))
        owner.take(step(5, sequence=OTHER, slot=1, committed=4, suspicion=2))
        assert ([], [], 2) == (owner.run(), owner.state.next_fetches(9, 9), len(owner.state.suspects))

        owner.take(SuspectTried(owner.owned()))
        assert [1] == owner.run_all()
        owner.take(SuspectTried(owner.owned(OTHER)))
        owner.restore(found(checkpointed=4, committed=4), OTHER)

        assert [5] == owner.run_all()

    def test_the_step_behind_one_with_which_owners_were_lost_begins_when_that_is_final(self) -> None:
        """If the step behind it ends this owner as well, that must not count for the first one once more."""
        tried, given_up = Owner(), Owner()
        for number in (1, 2):
            tried.take(step(number, flags=START if number == 1 else StepFlag.NONE, suspicion=2))
            given_up.take(step(number, flags=START, given_up=number == 1))
        tried.take(SuspectTried(tried.owned()))

        assert [1] == tried.run_all()
        assert ([], [(1, GIVEN_UP)]) == (given_up.run_all(), given_up.answered)
        for owner in (tried, given_up):
            owner.take(StepsFinal([(SEQUENCE, Epoch(1), StepNumber(1))]))
            assert [2] == owner.run_all()

    def test_a_trial_of_a_sequence_that_has_gone_does_nothing(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, suspicion=2))
        owned = owner.owned()
        owner.take(OwnershipOver(SEQUENCE, Epoch(1)))

        assert [] == owner.take(SuspectTried(owned))


class TestCancelledSteps:
    def test_a_cancelled_step_that_is_next_is_answered_and_voids_what_is_behind_it(self) -> None:
        owner = queued(1, 2)
        owner.take(cancelled(1))

        assert [(1, CANCELLED), (2, VOID)] == owner.answered
        assert VoidCause.CANCELLED is owner.owned().void
        assert [] == owner.run()

    def test_a_cancelled_step_behind_others_is_looked_at_when_it_is_next(self) -> None:
        owner = queued(1, 2, 3)
        owner.take(cancelled(2))
        assert [] == owner.answered

        assert [1] == owner.run()

        assert [(1, RAN), (2, CANCELLED), (3, VOID)] == owner.answered

    def test_a_cancelled_step_behind_others_leaves_them_their_turn(self) -> None:
        owner = Owner(rows=1)
        for number in (1, 2):
            owner.take(step(number, flags=START if number == 1 else StepFlag.NONE))
        owner.take(step(1, flags=START, sequence=OTHER, slot=1))

        owner.take(cancelled(2))

        batches = [batch for _ in range(2) if (batch := owner.begin())]
        assert [SEQUENCE, OTHER] == [one.owned.sequence for batch in batches for one in batch.members if one]

    def test_a_step_that_runs_is_not_disturbed_by_its_caller_leaving(self) -> None:
        owner = queued(1, 2)
        batch = owner.begin()
        assert batch is not None
        owner.take(cancelled(1))
        owner.end(batch)

        assert [2] == owner.run_all()
        assert [(1, RAN), (2, RAN)] == owner.answered

    def test_a_pass_whose_caller_left_meanwhile_is_the_last_one(self) -> None:
        owner = queued(1)
        batch = owner.begin()
        assert batch is not None
        owner.take(cancelled(1))

        owner.take(BatchDone(batch, [RowEnd.AGAIN]))

        assert [(1, CANCELLED)] == owner.answered

    def test_a_cancellation_of_another_ownership_or_of_what_is_done_changes_nothing(self) -> None:
        owner = queued(1, 2)
        owner.run()

        for event in (cancelled(2, epoch=2), cancelled(1), cancelled(2, sequence=OTHER)):
            assert [] == owner.take(event)
        assert [2] == owner.run_all()

    def test_a_step_that_was_cancelled_before_it_came_here_does_not_run(self) -> None:
        owner = Owner()
        owner.take(step(1, flags=START, cancelled=True))

        assert [(1, CANCELLED)] == owner.answered

    def test_a_cancelled_step_that_was_committed_is_replayed_for_the_state(self) -> None:
        owner = Owner()
        for number in (4, 5):
            owner.take(step(number, committed=4, cancelled=number == 4))

        owner.restore(found(checkpointed=3, committed=4))

        assert [4, 5] == owner.run_all()
        assert [(5, RAN)] == owner.answered
