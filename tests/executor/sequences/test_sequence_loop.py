"""A sequence model's loop around an engine that the test lets go batch by batch: what runs, and what is committed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from executor.core.events import CheckpointFetched, OwnershipOver
from executor.core.gathering import RETURNS
from executor.core.state import Checkpoint, OwnedSequence, VoidCause
from executor.engine.base import BatchResult, LateAnswer, Row, RowError, RowResult, Timings
from executor.engine.pytorch import devices
from executor.reporting.statistics import StatisticsRecorder
from executor.sequences.arrivals import FETCHES_PER_READ, PREFETCHES_PER_READ, try_suspects
from executor.sequences.committer import Taken
from executor.sequences.sequence_model import SequenceModel
from executor.workers import open_rows
from executor.workers.devices import DeviceLostError, Devices
from executor.workers.first_batch import FirstBatch
from executor.workers.worker import EngineWorker
from shared.contract.errors import Code, Reason
from shared.contract.ids import (
    CorrelationId,
    Epoch,
    ExecutorId,
    InstanceIndex,
    SlotIndex,
    StepNumber,
    correlation_id_of,
    sequence_id,
)
from shared.contract.messages import (
    InboxCancelled,
    InboxExpired,
    InboxOwned,
    InboxStep,
    InboxVacated,
    InferMessage,
    ReplyMessage,
    StepFlag,
    decode_reply,
)
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    ModelConfig,
    Oldest,
    SequenceBatching,
    StateSpec,
    TensorSpec,
)
from shared.contract.tensors import Tensor, to_numpy
from shared.statistics.tally import GAINED_ROWS, HELD_BATCHES, NULL_ROWS, ModelLoad, unpacked
from shared.store.script_values import CommitCode, StepCommit, StepOutcome
from shared.store.work_scripts import WorkHeld
from shared.traces.tracing import Tracing
from tests.executor.patience import PATIENCE_S, until

START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE


class HeldEngine:
    """Runs a batch when the test lets it; answers each row as the test says."""

    def __init__(self, answer: Callable[[Row], RowResult | RowError]) -> None:
        self.batches: list[Sequence[Row]] = []
        self.loaded: list[list[int]] = []
        self._answer = answer
        self._permits = threading.Semaphore(0)
        self.finished = 0
        self.states: set[int] = set()
        """Slots whose states take memory."""

    frees_slots = True

    def let_go(self, batches: int = 1) -> None:
        self._permits.release(batches)

    def take_back(self) -> None:
        """No batch goes on before the next `let_go`."""
        while self._permits.acquire(blocking=False):
            pass

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        self.batches.append(rows)
        assert self._permits.acquire(timeout=PATIENCE_S)
        self.finished += 1
        self.states |= {row.slot for row in rows if row.slot is not None}
        return BatchResult([None if row.null else self._answer(row) for row in rows], Timings(0, 0, 0))

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        self.loaded.append(list(slots))

    def describe_state(self, slot: int) -> str:
        return f"state of slot {slot}"

    def drop_state(self, slot: int) -> None:
        self.states.discard(slot)

    def close(self) -> None: ...


class RecordedCommits:
    """In the committer's place: everything is final at once. settled: cleared, its commits seem to be on their way."""

    def __init__(self) -> None:
        self.steps: list[StepCommit] = []
        self.below_bounds = asyncio.Event()
        self.below_bounds.set()
        self.settled = asyncio.Event()
        self.settled.set()

    def put(self, owner: SequenceModel, steps: Sequence[StepCommit]) -> Taken:
        self.steps += steps
        for step in steps:
            over = bool(step.flags & END)
            owner.committed([step], [CommitCode.OVER if over else CommitCode.COMMITTED], 0, 0)
        return [len(self.steps)]

    async def final(self, taken: Taken) -> None:
        assert sum(taken) <= len(self.steps)
        if taken:
            await self.settled.wait()

    async def drained(self) -> None: ...

    def outcome(self, step: int, correlation_id: CorrelationId = 7) -> StepOutcome | None:
        found = [c.outcome for c in self.steps if (c.sequence, c.step) == (sequence_id("m", "", correlation_id), step)]
        return found[0] if found else None

    def reply(self, step: int, correlation_id: CorrelationId = 7) -> ReplyMessage:
        (found,) = [c for c in self.steps if (c.sequence, c.step) == (sequence_id("m", "", correlation_id), step)]
        return decode_reply(found.reply)


def never_final(_commits: RecordedCommits, _owner: SequenceModel, _steps: Sequence[StepCommit]) -> Taken:
    return []


class Stage:
    """One model with engines in the test's hand."""

    def __init__(
        self, config: ModelConfig, engines: Sequence[HeldEngine], model: SequenceModel, running: asyncio.Task[None]
    ) -> None:
        self.running = running
        self.config = config
        self.engines = engines
        self.model = model
        self.commits = cast("RecordedCommits", cast("Any", model).commits)

    def step(
        self,
        number: int,
        flags: StepFlag = NONE,
        *,
        correlation_id: CorrelationId = 7,
        instance: int = 0,
        slot: int = 0,
        shape: tuple[int, ...] = (1, 1),
        own_sequence: bool = False,
        given_up: bool = False,
        suspicion: int = 0,
        chain: tuple[str, ...] = (),
        epoch: int = 1,
        more: bool = False,
    ) -> None:
        """A step comes out of the inbox. more: the same read has brought others, so nothing is begun yet"""
        tensor = Tensor("INPUT", "INT32", shape, bytes(4 * shape[-1]))
        message = InferMessage("m", "1", "", correlation_id, (tensor,), own_sequence=own_sequence, chain=chain)
        inbox = InboxStep(
            entry=f"{number}-{slot}",
            sequence=sequence_id("m", "", correlation_id),
            step=StepNumber(number),
            flags=flags,
            epoch=Epoch(epoch),
            instance=InstanceIndex(instance),
            slot=SlotIndex(slot),
            committed=StepNumber(0),
            version="1",
            gateway="g",
            token=str(number),
            message=b"",
            given_up=given_up,
            suspicion=suspicion,
        )
        self.model.take(inbox, message)
        if not more:
            self.model.look()

    def cancel(self, step: int, correlation_id: CorrelationId = 7) -> None:
        """The caller of a step has gone."""
        sequence = sequence_id("m", "", correlation_id)
        self.model.handle(InboxCancelled("9-9", sequence, Epoch(1), StepNumber(step)))

    def fetched(self) -> list[OwnedSequence]:
        """The sequences whose checkpoints are fetched next."""
        return self.model.state.next_fetches(FETCHES_PER_READ, PREFETCHES_PER_READ)

    def restore(self, owned: OwnedSequence, found: Checkpoint | None) -> Sequence[str]:
        """What Redis holds of a sequence has come."""
        return self.model.handle(CheckpointFetched(owned, found))

    async def begun(self, batches: int, instance: int = 0) -> Sequence[Row]:
        """The rows of a batch, once it runs; batches: so many have begun."""
        engine = self.engines[instance]
        await until(lambda: len(engine.batches) >= batches)
        assert batches == len(engine.batches)
        return engine.batches[-1]


def coming(correlation_id: int) -> InboxOwned:
    """A sequence of one committed step comes here."""
    sequence, place = sequence_id("m", "", correlation_id), SlotIndex(0)
    return InboxOwned("9-9", sequence, Epoch(1), InstanceIndex(0), place, StepNumber(1), "1")


def config(strategy: Direct | Oldest, *, controls: Sequence[ControlSpec] = (), iterative: bool = False) -> ModelConfig:
    batching = SequenceBatching(strategy, 60_000_000, tuple(controls), iterative=iterative)
    return ModelConfig(
        name="m",
        backend="python",
        platform="",
        max_batch_size=4,
        inputs=(TensorSpec("INPUT", "INT32", (-1,)),),
        outputs=(),
        sequence_batching=batching,
    )


def done(_: Row) -> RowResult:
    return RowResult(())


@asynccontextmanager
async def stage(
    model_config: ModelConfig,
    answer: Callable[[Row], RowResult | RowError] = done,
    *,
    instances: int = 1,
    first_batch: FirstBatch | None = None,
    slots: int | None = None,
    gpus: tuple[int, ...] = (),
    answer_writer: Any = None,
) -> AsyncGenerator[Stage]:
    engines = [HeldEngine(answer) for _ in range(instances)]
    workers = [EngineWorker(one, "m", f"m_{i}", InstanceIndex(i), Devices(gpus)) for i, one in enumerate(engines)]
    if first_batch is not None:
        for worker in workers:
            worker.first_batch = first_batch
    served = SimpleNamespace(
        config=model_config,
        version="1",
        workers=workers,
        slots=slots or model_config.configured_slots,
        statistics=StatisticsRecorder(ModelLoad("m", "1", "0")),
        mark="",
    )
    commits = RecordedCommits()
    model = SequenceModel(
        cast("Any", served),
        executor=ExecutorId("e"),
        committer=cast("Any", commits),
        tracing=Tracing(),
        answer_writer=answer_writer,
    )
    cast("Any", model).commits = commits
    running = asyncio.create_task(model.run())
    try:
        yield Stage(model_config, engines, model, running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for engine, worker in zip(engines, workers, strict=True):
            engine.let_go(100)
            await worker.close()


class TestCancelledSteps:
    async def test_a_waiting_step_and_all_behind_it_are_answered_without_the_model(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.step(1, START, correlation_id=1, slot=0)
            await on.begun(1)
            on.step(1, START, correlation_id=2, slot=1)
            on.step(2, NONE, correlation_id=2, slot=1)

            on.cancel(1, correlation_id=2)

            assert (StepOutcome.CANCELLED, StepOutcome.VOID) == (on.commits.outcome(1, 2), on.commits.outcome(2, 2))
            replies = [on.commits.reply(n, 2) for n in (1, 2)]
            assert [("CANCELLED", "")] * 2 == [(reply.error_code, reply.error) for reply in replies]
            on.engines[0].let_go(2)
            await until(lambda: on.commits.outcome(1, 1) is not None)
            assert 1 == len(on.engines[0].batches)

    async def test_the_model_is_told_of_the_row_that_nobody_waits_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[CorrelationId] = []

        def cancel(_: EngineWorker, row: Row) -> None:
            told.append(row.correlation_id)

        monkeypatch.setattr(EngineWorker, "cancel", cancel)
        async with stage(config(Oldest(4))) as on:
            on.step(1, START, correlation_id=1, slot=0, more=True)
            on.step(1, START, correlation_id=2, slot=1)
            await on.begun(1)
            on.cancel(2, correlation_id=1)
            on.cancel(1, correlation_id=2)
            on.engines[0].let_go(2)

        assert [2] == told

    async def test_a_start_behind_a_cancelled_step_begins_anew(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.step(1, START)
            await on.begun(1)
            on.step(2)
            on.step(3, START)
            on.cancel(2)
            on.engines[0].let_go(2)

            await until(lambda: on.commits.outcome(3) is not None)

            assert [StepOutcome.DONE, StepOutcome.CANCELLED, StepOutcome.DONE] == [
                on.commits.outcome(n) for n in (1, 2, 3)
            ]


async def test_no_batch_is_computed_while_too_many_commits_wait_for_redis() -> None:
    async with stage(config(Oldest(4))) as on:
        on.step(1, START)
        on.step(2)
        await on.begun(1)
        on.commits.below_bounds.clear()
        on.engines[0].let_go(2)
        await until(lambda: on.commits.outcome(1) is not None)
        await asyncio.sleep(0.05)
        assert 1 == len(on.engines[0].batches)

        on.commits.below_bounds.set()
        await until(lambda: on.commits.outcome(2) is not None)


@pytest.mark.parametrize("decoupled", [True, False])
async def test_a_step_of_a_decoupled_model_waits_until_the_one_before_is_final(*, decoupled: bool) -> None:
    """Its answers leave before its commit does."""
    async with stage(msgspec.structs.replace(config(Oldest(4)), decoupled=decoupled)) as on:
        assert decoupled == on.model.state.one_by_one


async def test_a_step_that_executors_were_lost_with_is_answered_without_the_model() -> None:
    async with stage(config(Oldest(4))) as on:
        on.step(1, START, given_up=True)
        on.step(2)
        on.step(3, START)
        await on.begun(1)
        on.engines[0].let_go(1)
        await until(lambda: on.commits.outcome(3) is not None)

        assert [StepOutcome.GIVEN_UP, StepOutcome.LOST, StepOutcome.DONE] == [on.commits.outcome(n) for n in (1, 2, 3)]
        replies = [decode_reply(step.reply) for step in on.commits.steps[:2]]
        assert [Code.INTERNAL, Code.INVALID_ARG] == [reply.error_code for reply in replies]
        assert [Reason.LOST] * 2 == [reply.reason for reply in replies]
        assert "sequence 7 of model 'm' was given up: 5 executors were lost with its next step" == replies[0].error
        assert 1 == len(on.engines[0].batches)


def checkpoint(
    *, epoch: int = 1, checkpointed: int, committed: int, void: VoidCause | None = None, cancelled: Sequence[int] = ()
) -> Checkpoint:
    gone = frozenset(map(StepNumber, cancelled))
    before, last, start = StepNumber(checkpointed), StepNumber(committed), StepNumber(1)
    return Checkpoint(Epoch(epoch), before, last, start, void, cancelled=gone)


class TestPrefetch:
    async def test_restores_come_in_bounded_reads_and_those_first_that_a_step_waits_for(self) -> None:
        async with stage(config(Oldest(4))) as on:
            idle = range(1, PREFETCHES_PER_READ + 3)
            waiting = range(1000, 1000 + FETCHES_PER_READ + 2)
            for number in idle:
                on.model.handle(coming(number))
            for number in waiting:
                on.step(2, correlation_id=number, slot=0)

            reads = [on.fetched() for _ in range(4)]

            fetched = [owned.sequence for read in reads for owned in read]
            assert [sequence_id("m", "", number) for number in (*waiting, *idle)] == fetched
            assert [FETCHES_PER_READ, 2, PREFETCHES_PER_READ, 2] == [len(read) for read in reads]
            assert [] == on.fetched()

    async def test_a_step_that_comes_while_the_state_does_runs_behind_it_once(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.model.handle(coming(7))
            (owned,) = on.fetched()
            on.step(2)
            on.step(2)
            assert not (on.model.state.to_fetch or on.model.state.awaited)

            on.restore(owned, checkpoint(checkpointed=1, committed=1))
            on.model.handle(coming(7))
            on.engines[0].let_go()

            await until(lambda: on.commits.outcome(2) is not None)
            assert not (on.model.state.to_fetch or on.model.state.awaited)
            assert [2] == [commit.step for commit in on.commits.steps]

    async def test_one_that_leaves_before_its_record_comes_stays_forgotten(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.model.handle(coming(7))
            (owned,) = on.fetched()
            on.model.handle(InboxVacated("9-9", owned.sequence, owned.epoch))

            on.restore(owned, checkpoint(checkpointed=1, committed=1))

            assert [] == on.model.holdings


class TestOwnership:
    async def test_what_was_fetched_for_an_ownership_before_does_not_end_the_present_one(self) -> None:
        """It was taken away and came back while its record was on its way."""
        async with stage(config(Oldest(4))) as on:
            on.step(2, epoch=1)
            (before,) = on.fetched()
            on.step(2, epoch=3)
            (now,) = on.fetched()

            on.restore(before, checkpoint(epoch=1, checkpointed=1, committed=1))
            on.restore(now, checkpoint(epoch=3, checkpointed=1, committed=1))
            on.engines[0].let_go()

            await until(lambda: on.commits.outcome(2) is not None)
            assert [3] == [commit.epoch for commit in on.commits.steps]

    async def test_a_sequence_that_comes_back_in_another_slot_leaves_nothing_in_the_old_one(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.step(1, START, correlation_id=1, slot=0)
            await on.begun(1)
            on.step(1, START, correlation_id=2, slot=1, epoch=1)
            on.step(1, START, correlation_id=2, slot=2, epoch=3)
            on.engines[0].let_go(2)

            await until(lambda: on.commits.outcome(1, 2) is not None)
            assert [2] == [row.slot for row in on.engines[0].batches[1]]

    async def test_a_step_of_the_past_changes_nothing_for_who_has_the_slot_now(self) -> None:
        """Left in the inbox when its sequence was taken away, it is read again after a restart of Redis."""
        async with stage(config(Oldest(4))) as on:
            on.step(1, START, correlation_id=1, slot=0)
            await on.begun(1)
            on.step(1, START, correlation_id=2, slot=1, epoch=5)

            on.step(1, START, correlation_id=3, slot=1)
            (past,) = on.fetched()
            on.restore(past, None)
            on.engines[0].let_go(2)

            await until(lambda: on.commits.outcome(1, 2) is not None)
            assert [5] == [commit.epoch for commit in on.commits.steps if commit.sequence.endswith("2")]
            assert on.commits.outcome(1, 3) is None

    async def test_a_step_that_comes_out_of_the_inbox_again_is_still_cancelled(self) -> None:
        """What told of it has left the inbox when it was heard, by the model as it was then."""
        async with stage(config(Oldest(4))) as on:
            on.step(2)
            on.step(3)
            (owned,) = on.fetched()
            on.restore(owned, checkpoint(checkpointed=1, committed=1, cancelled=[3]))
            on.engines[0].let_go(2)

            await until(lambda: on.commits.outcome(3) is not None)
            assert [StepOutcome.DONE, StepOutcome.CANCELLED] == [on.commits.outcome(n) for n in (2, 3)]

    async def test_what_is_replayed_without_a_state_leaves_the_inbox_with_the_next_answer(self) -> None:
        async with stage(config(Oldest(4))) as on:
            for number in (2, 3, 4):
                on.step(number)
            (owned,) = on.fetched()

            on.restore(owned, checkpoint(checkpointed=1, committed=3, void=VoidCause.LOST))

            (answered,) = on.commits.steps
            assert (4, StepOutcome.LOST) == (answered.step, answered.outcome)
            assert ["2-0", "3-0", "4-0"] == answered.entries

    async def test_calls_of_a_replayed_step_know_it_by_its_owners_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HeldEngine, "makes_calls", True, raising=False)
        async with stage(config(Oldest(4))) as on:
            for number in (2, 3):
                on.step(number)
            (owned,) = on.fetched()
            on.restore(owned, checkpoint(checkpointed=1, committed=2))
            on.engines[0].let_go(2)
            await until(lambda: on.commits.outcome(3) is not None)

            origins = [batch[0].origin for batch in on.engines[0].batches]
            assert [1, 0] == [origin and origin.replayed_in for origin in origins]

    async def test_nothing_is_called_behind_a_step_that_failed_before_that_is_final(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The executor may have lost the sequence, and the next one may do the step."""
        monkeypatch.setattr(HeldEngine, "makes_calls", True, raising=False)
        monkeypatch.setattr(RecordedCommits, "put", never_final)
        async with stage(
            config(Oldest(4)), lambda row: done(row) if row.start else RowError(Code.UNAVAILABLE, "")
        ) as on:
            on.engines[0].let_go(3)
            for number, flags in ((1, START), (2, NONE), (3, NONE)):
                on.step(number, flags)
            await until(lambda: on.engines[0].finished >= 2)
            await asyncio.sleep(0.1)

            assert 2 == len(on.engines[0].batches)

    @pytest.mark.parametrize("mark", ["old", "new", ""])
    async def test_a_state_of_another_load_is_not_taken_nor_made_anew_from_its_start(self, mark: str) -> None:
        async with stage(config(Oldest(4))) as on:
            on.model.state.mark = "new"
            for number, flags in ((2, NONE), (1, START), (3, NONE)):
                on.step(number, flags)
            (owned,) = on.fetched()
            on.engines[0].let_go(3)

            on.restore(owned, replace(checkpoint(checkpointed=0, committed=2), mark=mark))

            await until(lambda: on.commits.outcome(3) is not None)
            assert [3] == [step.step for step in on.commits.steps]
            is_lost = on.commits.outcome(3) is StepOutcome.LOST
            assert is_lost == (mark == "old")
            assert len(on.engines[0].batches) == (0 if is_lost else 3)

    async def test_whoever_leaves_frees_the_memory_of_its_state(self) -> None:
        """By END, by expiry, in the middle of a batch, and with the lease; who stays keeps it."""
        async with stage(config(Oldest(8))) as on:
            engine = on.engines[0]
            for slot in range(5):
                on.step(1, START, correlation_id=slot + 1, slot=slot)
            engine.let_go(5)
            await until(lambda: len(on.commits.steps) == 5)
            assert {0, 1, 2, 3, 4} == engine.states
            assert len(engine.batches) == engine.finished
            # Permits that the batches before did not need would let the next one go.
            engine.take_back()

            on.step(2, END, correlation_id=1, slot=0)
            on.model.handle(InboxExpired("9-9", sequence_id("m", "", 2), Epoch(1)))
            batches = len(engine.batches)
            on.step(2, correlation_id=3, slot=2)
            await until(lambda: len(engine.batches) > batches or len(engine.batches[-1]) == 2)
            on.model.handle(OwnershipOver(sequence_id("m", "", 3), Epoch(1)))
            engine.let_go(5)

            await until(lambda: engine.states == {3, 4})
            on.model.forget_all()
            await until(lambda: not engine.states)


class TestSuspects:
    """Sequences with which several owners in a row were lost."""

    async def test_one_at_a_time_is_tried_and_called_ones_at_once_because_the_tried_step_may_wait_for_them(
        self,
    ) -> None:
        async with stage(config(Oldest(4))) as on, trials(on):
            on.step(1, START, correlation_id=1, slot=0, suspicion=2)
            await on.begun(1)
            on.step(1, START, correlation_id=2, slot=1, suspicion=2)
            on.step(1, START, correlation_id=3, slot=2, suspicion=2, chain=("caller",))
            # A step of a client, and behind it one of a caller.
            on.step(1, START, correlation_id=4, slot=3, suspicion=2)

            await until(lambda: len(on.model.state.suspects) == 2)
            on.step(2, correlation_id=4, slot=3, chain=("caller",))
            await until(lambda: [sequence_id("m", "", 2)] == [one.sequence for one in on.model.state.suspects])

            on.engines[0].let_go(2)
            await until(lambda: on.commits.outcome(1, 3) is not None and on.commits.outcome(1, 4) is not None)
            on.model.committed(on.commits.steps, [CommitCode.COMMITTED] * len(on.commits.steps), 0, 0)
            await until(lambda: not on.model.state.suspects)

    async def test_one_that_hangs_does_not_hold_up_the_others_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("executor.sequences.arrivals.TRIAL_S", 0.05)
        async with stage(config(Oldest(4)), instances=2) as on, trials(on):
            on.step(1, START, correlation_id=1, instance=0, suspicion=2)
            await on.begun(1, instance=0)
            on.step(1, START, correlation_id=2, instance=1, suspicion=2)

            await on.begun(1, instance=1)

    async def test_the_step_behind_a_tried_one_runs_as_soon_as_that_is_final(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with stage(config(Oldest(4))) as on, trials(on):
            sent: list[StepCommit] = []

            def put(_: SequenceModel, steps: Sequence[StepCommit]) -> Taken:
                sent.extend(steps)
                return []

            monkeypatch.setattr(on.commits, "put", put)
            on.step(1, START, suspicion=2)
            on.step(2, suspicion=2)
            on.engines[0].let_go(2)
            await until(lambda: bool(sent))
            on.step(1, START, correlation_id=8, slot=1)
            await until(lambda: len(sent) == 2)
            assert [7, 8] == [correlation_id_of(commit.sequence) for commit in sent]

            on.engines[0].let_go()
            on.model.committed(sent[:1], [CommitCode.COMMITTED], 0, 0)
            await until(lambda: len(sent) == 3)


@asynccontextmanager
async def trials(on: Stage) -> AsyncGenerator[None]:
    """The suspected ones are tried meanwhile."""

    def attempt(*named: object) -> object:
        return named

    async def run(_: object) -> None:
        """Redis is told of an attempt."""

    scripts = SimpleNamespace(attempt=attempt, run=run)
    trying = asyncio.create_task(try_suspects(on.model, cast("Any", SimpleNamespace(scripts=scripts)), asyncio.Lock()))
    yield
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)


class TestExpiry:
    @pytest.mark.parametrize(("describes", "epoch", "told"), [(True, 1, True), (False, 1, False), (True, 2, False)])
    async def test_the_state_of_an_expired_sequence_is_described_in_the_log_if_the_model_asks_for_it(
        self, caplog: pytest.LogCaptureFixture, *, describes: bool, epoch: int, told: bool
    ) -> None:
        """By the owner that the scheduler means."""
        caplog.set_level(logging.INFO, "seqmesh")
        quiet = config(Oldest(4))
        assert quiet.sequence_batching is not None
        batching = msgspec.structs.replace(quiet.sequence_batching, describe_on_expiry=describes)
        async with stage(msgspec.structs.replace(quiet, sequence_batching=batching)) as on:
            on.step(1, START, slot=3)
            on.engines[0].let_go()
            await until(lambda: on.commits.outcome(1) is not None)

            on.model.handle(InboxExpired("9-9", sequence_id("m", "", 7), Epoch(epoch)))

        lines = [vars(record)["fields"] for record in caplog.records if record.message == "sequence expired"]
        assert ["state of slot 3"] * told == [fields["state"] for fields in lines]


class TestIterativeSequences:
    """A model that wants each request three times (triton-spec 1.10)."""

    @staticmethod
    def thrice() -> Callable[[Row], RowResult]:
        passes: dict[CorrelationId, int] = {}

        def answer(row: Row) -> RowResult:
            passes[row.correlation_id] = 1 if row.start else passes[row.correlation_id] + 1
            return RowResult((), again=passes[row.correlation_id] < 3)

        return answer

    @pytest.mark.parametrize("strategy", [Direct(), Oldest(4)])
    async def test_a_request_of_its_own_starts_once_and_never_ends(self, strategy: Direct | Oldest) -> None:
        async with stage(config(strategy, iterative=True), self.thrice()) as on:
            on.engines[0].let_go(3)
            on.step(1, START | END, own_sequence=True)

            await until(lambda: on.commits.outcome(1) is not None)

            flags = [(rows[0].start, rows[0].end) for rows in on.engines[0].batches]
            assert [(True, False), (False, False), (False, False)] == flags
            assert [START | END] == [commit.flags for commit in on.commits.steps], "for the mesh it is one step"
            assert 0 == on.commits.reply(1).step
            assert 0 == len(on.model.state)

    async def test_a_sequence_of_the_clients_own_keeps_its_flags_and_its_order(self) -> None:
        async with stage(config(Oldest(4), iterative=True), self.thrice()) as on:
            on.engines[0].let_go(6)
            on.step(1, START)
            on.step(2, START | END)

            await until(lambda: on.commits.outcome(2) is not None)

            flags = [(rows[0].start, rows[0].end) for rows in on.engines[0].batches]
            again = [(False, False)] * 2
            assert [(True, False), *again, (True, True), *again] == flags

    async def test_a_later_pass_joins_the_others_in_a_batch(self) -> None:
        async with stage(config(Oldest(4), iterative=True), self.thrice()) as on:
            on.step(1, START | END, correlation_id=1, slot=0, own_sequence=True)
            await on.begun(1)
            on.step(1, START | END, correlation_id=2, slot=1, own_sequence=True)
            on.engines[0].let_go()

            rows = await on.begun(2)

            assert [(2, True), (1, False)] == [(row.correlation_id, row.start) for row in rows]

    async def test_a_pass_that_fails_is_the_answer(self) -> None:
        def answer(row: Row) -> RowResult | RowError:
            return RowResult((), again=True) if row.start else RowError("INTERNAL", "tired")

        async with stage(config(Oldest(4), iterative=True), answer) as on:
            on.engines[0].let_go(2)
            on.step(1, START | END, own_sequence=True)

            await until(lambda: on.commits.outcome(1) is not None)

            assert (StepOutcome.FAILED, "tired") == (on.commits.outcome(1), on.commits.reply(1).error)

    async def test_passes_that_answer_nobody_count_as_executions_with_the_answer(self) -> None:
        async with stage(config(Oldest(4), iterative=True), self.thrice()) as on:
            on.engines[0].let_go(3)
            on.step(1, START | END, own_sequence=True)

            await until(lambda: on.commits.outcome(1) is not None)

            (commit,) = on.commits.steps
            assert 3 == unpacked(commit.execution)["batch:1:count"]
            assert 1 == unpacked(commit.counts)["success_count"]


class TestControls:
    """The gateway refuses such ids; this is for one whose knowledge of the model is old."""

    @pytest.mark.parametrize(("datatype", "correlation_id"), [("INT32", "one"), ("BYTES", 1)])
    async def test_an_id_that_the_control_cannot_hold_is_refused_and_never_something_else(
        self, datatype: str, correlation_id: CorrelationId
    ) -> None:
        controls = (ControlSpec("CORRID", ControlKind.CORRID, datatype),)
        async with stage(config(Oldest(4), controls=controls)) as on:
            on.step(1, START, correlation_id=correlation_id)
            on.step(2, NONE, correlation_id=correlation_id)

            first, second = (on.commits.reply(n, correlation_id) for n in (1, 2))

            given = "UINT64" if datatype == "BYTES" else "BYTES"
            assert f"control 'CORRID' data-type is '{given}', but model 'm' expects '{datatype}'" in first.error
            assert "INVALID_ARG" == first.error_code
            assert "the sequence's START failed" in second.error
            assert not on.engines[0].batches


class TestIdle:
    async def test_an_instance_that_has_nothing_to_do_is_woken_by_the_next_step(self) -> None:
        async with stage(config(Oldest(4))) as on:
            on.engines[0].let_go(3)
            for number, flags in ((1, START), (2, NONE), (3, END)):
                on.step(number, flags)
                await until(lambda step=number: on.commits.outcome(step) is not None)
                # The loop goes to sleep before anything else comes.
                for _ in range(10):
                    await asyncio.sleep(0)


class TestOrder:
    @pytest.mark.parametrize("preserves", [True, False])
    async def test_with_preserve_ordering_a_batch_waits_for_the_answers_before_it(self, *, preserves: bool) -> None:
        async with stage(config(Oldest(4, preserve_ordering=preserves))) as on:
            on.commits.settled.clear()
            on.step(1, START, correlation_id=1, slot=0)
            await on.begun(1)
            on.step(1, START, correlation_id=2, slot=1)
            on.engines[0].let_go(2)
            await until(lambda: on.engines[0].finished >= 2)
            if not preserves:
                await until(lambda: on.commits.outcome(1, 2) is not None)
                return
            await asyncio.sleep(0.01)
            assert on.commits.outcome(1, 2) is None

            on.commits.settled.set()

            await until(lambda: on.commits.outcome(1, 2) is not None)


class ShortPace:
    """Says of every batch that it will be short."""

    is_short = True

    def took(self, us: float) -> None: ...


@asynccontextmanager
async def short_batches(model_config: ModelConfig, **options: Any) -> AsyncGenerator[Stage]:
    """A stage whose engine runs every batch on the loop, and rests."""
    async with stage(model_config, **options) as on:
        vars(on.model.serves.workers[0])["_pace"] = ShortPace()
        on.engines[0].let_go(100)
        # Its loop has come to its first wait.
        for _ in range(5):
            await asyncio.sleep(0)
        yield on


class TestShortBatches:
    """What is asked for right behind a read, with nothing awaited in between, happens in the read's own turn."""

    async def test_the_steps_of_a_read_run_in_one_batch_and_are_put_for_commit_at_once(self) -> None:
        async with short_batches(config(Oldest(4))) as on:
            for number in (1, 2, 3):
                on.step(1, START, correlation_id=number, slot=number - 1, more=True)

            on.model.look(at_once=True)

            assert [3] == [len(rows) for rows in on.engines[0].batches]
            assert [StepOutcome.DONE] * 3 == [on.commits.outcome(1, number) for number in (1, 2, 3)]
            await on.model.quiet()

    async def test_what_does_not_fit_the_batch_runs_in_the_instances_loop(self) -> None:
        async with short_batches(config(Oldest(4))) as on:
            for number in range(1, 7):
                on.step(1, START, correlation_id=number, slot=number - 1, more=True)

            on.model.look(at_once=True)

            assert [4] == [len(rows) for rows in on.engines[0].batches]
            await until(lambda: on.commits.outcome(1, 6) is not None)
            assert [4, 2] == [len(rows) for rows in on.engines[0].batches]

    async def test_a_step_outside_of_a_read_waits_for_what_else_comes_in_its_turn(self) -> None:
        async with short_batches(config(Oldest(4))) as on:
            on.step(1, START, correlation_id=1, slot=0)
            assert [] == on.engines[0].batches
            on.step(1, START, correlation_id=2, slot=1)

            await until(lambda: on.commits.outcome(1, 2) is not None)

            assert [2] == [len(rows) for rows in on.engines[0].batches]

    @pytest.mark.parametrize("reason", ["stopping", "too many commits"])
    async def test_nothing_is_run_that_may_not_run_yet(self, reason: str) -> None:
        async with short_batches(config(Oldest(4))) as on:
            if reason == "stopping":
                await on.model.quiet()
            if reason == "too many commits":
                on.commits.below_bounds.clear()
            on.step(1, START, more=True)

            on.model.look(at_once=True)

            assert [] == on.engines[0].batches

    async def test_with_preserve_ordering_a_batch_waits_for_the_answers_before_it(self) -> None:
        async with short_batches(config(Oldest(4, preserve_ordering=True))) as on:
            for number in (1, 2):
                on.step(1, START, correlation_id=number, slot=number - 1, more=True)
                on.model.look(at_once=True)
                await until(lambda: on.engines[0].finished == number)  # noqa: B023 - called within the loop
                await asyncio.sleep(0.01)
                on.commits.settled.clear()
            assert (StepOutcome.DONE, None) == (on.commits.outcome(1, 1), on.commits.outcome(1, 2))

            on.commits.settled.set()

            await until(lambda: on.commits.outcome(1, 2) is not None)

    async def test_a_device_that_is_lost_ends_the_instances_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(_: Devices) -> None:
            raise DeviceLostError("device lost")

        def fails(_: Row) -> RowResult:
            raise RuntimeError("no such device")

        async with short_batches(config(Oldest(4)), answer=fails) as on:
            monkeypatch.setattr(Devices, "check", lost)
            on.step(1, START, more=True)

            on.model.look(at_once=True)

            with pytest.raises(ExceptionGroup) as raised:
                await on.running
            assert raised.group_contains(DeviceLostError)
            assert [] == on.commits.steps


class TestNullRows:
    async def test_an_idle_slot_and_one_of_other_shapes_are_rows_that_are_not_ready(self) -> None:
        controls = (
            ControlSpec("READY", ControlKind.READY, "FP32", (0, 1)),
            ControlSpec("START", ControlKind.START, "INT32", (0, 1)),
            ControlSpec("CORRID", ControlKind.CORRID, "BYTES"),
        )
        async with stage(config(Direct(), controls=controls), first_batch=FirstBatch(2)) as on:
            on.step(1, START, correlation_id="short", slot=3)
            on.step(1, START, correlation_id="long", slot=1, shape=(1, 2))

            rows = await on.begun(1)

            assert [True, True, True, False] == [row.null for row in rows]
            values = [{name: to_numpy(tensor).item() for name, tensor in row.controls.items()} for row in rows]
            assert {"READY": 0.0, "START": 0, "CORRID": b""} == values[0] == values[1]
            assert {"READY": 1.0, "START": 1, "CORRID": b"short"} == values[3]
            assert {(1, 1)} == {tensor.shape for tensor in rows[0].controls.values()}
            on.engines[0].let_go()
            rows = await on.begun(2)
            assert [True, False] == [row.null for row in rows]
            (counted,) = [unpacked(commit.execution) for commit in on.commits.steps if commit.execution]
            assert (1, 3) == (counted["batch:4:count"], counted[NULL_ROWS])


class TestGathering:
    async def test_a_batch_waits_for_who_is_about_to_come_back_and_counts_it(self) -> None:
        async with stage(config(Direct())) as on:
            on.engines[0].let_go(1)
            for slot in (0, 1):
                on.step(1, START, correlation_id=slot + 1, slot=slot)
            await until(lambda: on.commits.outcome(1, 2) is not None)
            # A minute is nothing beside the time of a batch that it has learned, and everybody came back by then.
            (learned,) = on.model.state.gathering
            for _ in range(RETURNS):
                learned.times.learn(2, 6_000_000_000)
                learned.returns.learn(60_000_000)

            on.step(2, correlation_id=1, slot=0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert 1 == len(on.engines[0].batches)
            on.step(2, correlation_id=2, slot=1)
            on.engines[0].let_go(1)

            await until(lambda: on.commits.outcome(2, 2) is not None)
            assert 2 == len(on.engines[0].batches[1])
            held = [unpacked(commit.execution) for commit in on.commits.steps if commit.execution][-1]
            assert (1, 1) == (held[HELD_BATCHES], held[GAINED_ROWS])


class TestFirstBatch:
    async def test_direct_waits_for_the_slots_of_all_instances(self) -> None:
        async with stage(config(Direct()), instances=2, first_batch=FirstBatch(3)) as on:
            on.step(1, START, correlation_id=1, instance=0, slot=0)
            on.step(2, NONE, correlation_id=1, instance=0, slot=0)
            await asyncio.sleep(0)
            assert not on.engines[0].batches
            on.step(1, START, correlation_id=2, instance=1, slot=0)

            assert 1 == len(await on.begun(1, instance=0))
            assert 1 == len(await on.begun(1, instance=1))

    async def test_a_second_run_of_an_id_that_has_its_slot_waits_in_the_backlog_unless_a_slot_is_free(self) -> None:
        async with stage(config(Direct()), first_batch=FirstBatch(4, backlog=2)) as on:
            for number in range(1, 4):
                on.step(number, START | END, correlation_id=1, slot=0)
            for slot in (1, 2):
                on.step(1, START, correlation_id=slot + 1, slot=slot)
            await asyncio.sleep(0.1)
            # As many are queued as the gate wants, but one of them has Triton's last free slot.
            assert not on.engines[0].batches

            on.step(1, START, correlation_id=4, slot=3)

            assert 4 == len(await on.begun(1))

    async def test_oldest_waits_for_what_is_ready_in_one_instance(self) -> None:
        async with stage(config(Oldest(4)), first_batch=FirstBatch(2)) as on:
            on.step(1, START, correlation_id=1, slot=0)
            on.step(2, NONE, correlation_id=1, slot=0)
            on.step(1, START, correlation_id=2, slot=1)

            assert [1, 2] == [row.correlation_id for row in await on.begun(1)]
            on.engines[0].let_go()
            assert [1] == [row.correlation_id for row in await on.begun(2)]


class TestManyStates:
    """What one read brings goes to the engine in one call."""

    @staticmethod
    def came(on: Stage, count: int) -> list[OwnedSequence]:
        for number in range(count):
            on.step(2, correlation_id=number, slot=number)
        return on.fetched()

    @staticmethod
    def with_state() -> Checkpoint:
        return replace(checkpoint(checkpointed=1, committed=1), states={"S": Tensor("S", "UINT8", (1,), b"s")})

    async def test_the_states_of_a_read_are_loaded_together_and_their_steps_run(self) -> None:
        async with stage(config(Oldest(64))) as on:
            for owned in self.came(on, 6):
                on.restore(owned, self.with_state())
            on.engines[0].let_go(2)

            await until(lambda: None not in [on.commits.outcome(2, number) for number in range(6)])

            assert [[0, 1, 2, 3, 4, 5]] == on.engines[0].loaded

    async def test_a_sequence_that_is_gone_again_by_then_is_not_loaded(self) -> None:
        """Its slot has another sequence, and its model has forgotten it."""
        async with stage(config(Oldest(64))) as on:
            gone, stays = self.came(on, 2)
            on.restore(gone, self.with_state())
            on.restore(stays, self.with_state())
            on.model.handle(OwnershipOver(gone.sequence, gone.epoch))
            on.step(1, START, correlation_id=9, slot=0)
            on.engines[0].let_go(2)

            await until(lambda: None not in (on.commits.outcome(2, 1), on.commits.outcome(1, 9)))

            assert [[1]] == on.engines[0].loaded

    async def test_what_came_before_the_registration_ended_is_not_loaded_into_the_next_one(self) -> None:
        async with stage(config(Oldest(64))) as on:
            (owned,) = self.came(on, 1)
            on.restore(owned, self.with_state())
            on.model.forget_all()
            await asyncio.sleep(0)
            # The engine's thread has done what it was told until now.
            await on.model._instances[0].worker.load(())

            assert [] == on.engines[0].loaded


class TestGrowingState:
    """An engine hands a state that grows out whole, and checkpoints hold the difference."""

    @staticmethod
    def model() -> ModelConfig:
        plain = config(Oldest(4))
        assert plain.sequence_batching is not None
        state = StateSpec("S", "S_OUT", "UINT8", (-1, 1024), growable=True)
        return msgspec.structs.replace(
            plain, sequence_batching=msgspec.structs.replace(plain.sequence_batching, states=(state,))
        )

    @staticmethod
    def grown(row: Row) -> RowResult:
        """Steps of three positions, then four, then five."""
        positions = len(to_numpy(row.inputs["INPUT"])[0])
        return RowResult((), {"S": Tensor("S", "UINT8", (positions, 1024), b"s" * (positions * 1024))})

    async def parts(self, on: Stage, *steps: tuple[int, StepFlag, int, int]) -> list[tuple[list[str], bool]]:
        """Runs steps (number, flags, positions, epoch) one after the other: the parts that each of them writes, and
        whether nothing may stay of the checkpoint before.
        """
        on.engines[0].let_go(len(steps))
        for number, flags, positions, epoch in steps:
            on.step(number, flags, shape=(1, positions), epoch=epoch)
            await until(lambda number=number: on.commits.outcome(number) is not None)
        fields = [[name for name, _ in step.checkpoint if name.startswith("g:")] for step in on.commits.steps]
        return list(zip(fields, [step.anew for step in on.commits.steps], strict=True))

    async def test_a_step_writes_what_it_added_and_a_start_writes_all(self) -> None:
        async with stage(self.model(), self.grown) as on:
            written = await self.parts(on, (1, START, 3, 1), (2, NONE, 4, 1), (3, START, 2, 1), (4, NONE, 3, 1))

        whole = (["g:0:S", "g:1:S", "g:2:S"], True)
        assert [whole, (["g:3:S"], False), (whole[0][:2], True), (["g:2:S"], False)] == written

    async def test_nothing_is_known_of_a_checkpoint_when_a_sequence_has_been_elsewhere(self) -> None:
        async with stage(self.model(), self.grown) as on:
            await self.parts(on, (1, START, 3, 1))
            on.model.handle(OwnershipOver(sequence_id("m", "", 7), Epoch(1)))
            on.step(2, epoch=2, shape=(1, 4))
            (owned,) = on.fetched()
            found = checkpoint(epoch=2, checkpointed=1, committed=1)
            on.restore(owned, replace(found, states={"S": Tensor("S", "UINT8", (3, 1024), b"s" * 3072)}))
            on.engines[0].let_go(1)
            await until(lambda: on.commits.outcome(2) is not None)

            assert on.commits.steps[-1].anew
            assert 5 == len(on.commits.steps[-1].checkpoint)


class TestStaging:
    """A full batch is given to the engine while another one runs, so that the device need not wait for the loop."""

    @staticmethod
    async def two_full(on: Stage) -> None:
        """One batch of four runs, and four other sequences have a step."""
        for number in range(1, 5):
            on.step(1, START, correlation_id=number, slot=number)
        await on.begun(1)
        for number in range(5, 9):
            on.step(1, START, correlation_id=number, slot=number)

    @pytest.mark.parametrize("strategy", [Direct(), Oldest(64)])
    async def test_the_engine_goes_on_although_the_loop_is_busy(self, strategy: Direct | Oldest) -> None:
        async with stage(config(strategy), slots=64) as on:
            await self.two_full(on)
            (engine,) = on.engines

            engine.let_go()
            deadline_s = time.monotonic() + PATIENCE_S
            while len(engine.batches) < 2 and time.monotonic() < deadline_s:
                time.sleep(0.001)  # noqa: ASYNC251 - the loop stands still: that is the case

            assert [[1, 2, 3, 4], [5, 6, 7, 8]] == [[row.correlation_id for row in rows] for rows in engine.batches]
            engine.let_go()
            await until(lambda: on.commits.outcome(1, 8) is not None)

    async def test_one_batch_is_staged_at_a_time(self) -> None:
        async with stage(config(Oldest(64))) as on:
            await self.two_full(on)
            for number in range(9, 13):
                on.step(1, START, correlation_id=number, slot=number)

            assert 4 == len(on.model.state.ready[0])
            on.engines[0].let_go()
            await on.begun(2)
            await until(lambda: not len(on.model.state.ready[0]))

    async def test_nothing_is_staged_while_too_many_commits_are_open(self) -> None:
        async with stage(config(Oldest(64))) as on:
            on.commits.below_bounds.clear()
            await self.two_full(on)

            assert 4 == len(on.model.state.ready[0])

    async def test_a_staged_batch_began_when_the_one_before_it_had_ended(self) -> None:
        async with stage(config(Oldest(64))) as on:
            await self.two_full(on)
            given_ns = time.time_ns()
            await asyncio.sleep(0.01)
            on.engines[0].let_go()
            await until(lambda: on.commits.outcome(1, 1) is not None)
            ended_ns = time.time_ns()
            on.engines[0].let_go()
            await until(lambda: on.commits.outcome(1, 8) is not None)

            first, *_, last = [unpacked(commit.counts)["queue_ns"] for commit in on.commits.steps]
            assert first < given_ns < given_ns + 10_000_000 <= last <= ended_ns

    async def test_who_ends_waits_for_the_staged_batch_too(self) -> None:
        async with stage(config(Oldest(64))) as on:
            await self.two_full(on)
            quiet = asyncio.create_task(on.model.quiet())
            on.engines[0].let_go()
            await until(lambda: on.commits.outcome(1, 1) is not None)
            assert not quiet.done()
            on.step(2, correlation_id=1, slot=1)
            on.engines[0].let_go()

            await quiet

            assert on.commits.outcome(1, 8) is StepOutcome.DONE
            assert on.commits.outcome(2, 1) is None

    async def test_a_batch_that_raises_does_not_harm_the_staged_one(self) -> None:
        def answer(row: Row) -> RowResult:
            if row.correlation_id == 1:
                raise MemoryError("no room")
            return RowResult(())

        async with stage(config(Oldest(64)), answer) as on:
            await self.two_full(on)
            on.engines[0].let_go(2)

            await until(lambda: on.commits.outcome(1, 8) is not None)

            outcomes = [on.commits.outcome(1, number) for number in range(1, 9)]
            assert [StepOutcome.FAILED] * 4 + [StepOutcome.DONE] * 4 == outcomes

    async def test_a_device_that_is_lost_answers_neither_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gone(_: int) -> str:
            return "gone"

        async with stage(config(Oldest(64)), lambda _: RowError("INTERNAL", "CUDA error"), gpus=(0,)) as on:
            await self.two_full(on)
            monkeypatch.setattr(devices, "gpu_problem", gone)

            on.engines[0].let_go(2)
            with pytest.raises(ExceptionGroup) as raised:
                await on.running

            assert raised.group_contains(DeviceLostError)
            await on.model.quiet()
            assert [] == on.commits.steps


class TestLateAnswers:
    """Steps whose only answers come behind their batches."""

    async def test_a_model_hears_that_a_caller_has_left_while_the_batch_ran(self) -> None:
        late = LateAnswer()
        async with stage(config(Oldest(4)), lambda _: RowResult((), open=True, late=late)) as on:
            on.step(1, START)
            await on.begun(1)
            on.cancel(1)
            on.engines[0].let_go()
            await until(lambda: late.is_cancelled)

            late.end(RowResult(()))
            await until(lambda: on.commits.outcome(1) is StepOutcome.DONE)

    async def test_nothing_stays_open_of_a_sequence_that_left_while_its_batch_ran(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(open_rows, "FINISH_S", 10 * PATIENCE_S)
        late = LateAnswer()
        async with stage(config(Oldest(4)), lambda _: RowResult((), open=True, late=late)) as on:
            on.step(1, START)
            await on.begun(1)
            on.model.handle(OwnershipOver(sequence_id("m", "", 7), Epoch(1)))
            on.engines[0].let_go()

            await asyncio.wait_for(on.model.quiet(), PATIENCE_S)
            await until(lambda: late.is_cancelled)
            late.end(RowResult(()))
            assert [] == on.commits.steps

    async def test_an_answer_to_a_sequence_that_is_gone_goes_nowhere_and_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(open_rows, "FINISH_S", 10 * PATIENCE_S)
        late = LateAnswer()
        async with stage(config(Oldest(4)), lambda _: RowResult((), open=True, late=late)) as on:
            on.step(1, START)
            on.engines[0].let_go()
            await until(lambda: cast("Any", late)._to is not None)
            on.model.handle(OwnershipOver(sequence_id("m", "", 7), Epoch(1)))

            assert late.is_cancelled
            late.end(RowResult(()))
            await asyncio.wait_for(on.model.quiet(), PATIENCE_S)
            assert [] == on.commits.steps


class RefusedAnswers:
    """In the place of who writes answers to open steps: their sequences have other owners."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def write(self, steps: Sequence[Any]) -> Sequence[WorkHeld]:
        return [WorkHeld.GONE] * len(steps)


async def test_a_sequence_of_which_an_answer_is_refused_is_dropped_and_its_model_told() -> None:
    def answers_for_ever(row: Row) -> RowResult:
        assert row.answers is not None
        row.answers.send(RowResult(()))
        return RowResult((), open=True)

    decoupled = msgspec.structs.replace(config(Oldest(4)), decoupled=True)
    async with stage(decoupled, answers_for_ever, answer_writer=RefusedAnswers()) as on:
        on.step(1, START)
        (row,) = await on.begun(1)
        on.engines[0].let_go()

        await until(lambda: not len(on.model.state))

        assert row.answers is not None
        assert row.answers.is_cancelled
        assert not on.model.state.is_busy
        await until(lambda: not on.engines[0].states)
