"""An executor that owns the sequences of one model, played with `decide` alone: batches run when the test says so."""

from __future__ import annotations

from collections import Counter

from executor.core.actions import Commit, ExecutorAction, HowAnswered, LoadState, Remove, RunBatch
from executor.core.decide import decide, next_batch, staged_batch
from executor.core.events import BatchDone, CheckpointFetched, ExecutorEvent, RowEnd, StateLoaded
from executor.core.recovery import Checkpoints, Recovery
from executor.core.sequence_batches import OldestSteps
from executor.core.state import Checkpoint, OwnedPhase, OwnedSequence, OwnedSequences, QueuedStep, VoidCause
from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxOwned, InboxStep, InferMessage, StepFlag
from shared.contract.model_config import Oldest

ABSENT = OwnedPhase.ABSENT
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
    message: bytes = b"",
    cancelled: bool = False,
    given_up: bool = False,
    suspicion: int = 0,
) -> QueuedStep:
    """A step as it comes from the inbox."""
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
        message=message,
        cancelled=cancelled,
        given_up=given_up,
        suspicion=suspicion,
    )
    return QueuedStep(inbox, MESSAGE, 0, None)


def coming(*, epoch: int = 1, committed: int = 4, slot: int = 0) -> InboxOwned:
    """A sequence comes before its next step."""
    return InboxOwned("9-9", SEQUENCE, Epoch(epoch), InstanceIndex(0), SlotIndex(slot), StepNumber(committed), "1")


def found(*, checkpointed: int, committed: int, epoch: int = 1, void: VoidCause | None = None) -> Checkpoint:
    """What Redis holds of a sequence; the model gave `state` for the checkpointed step."""
    model_state = b"state" if checkpointed and void is None else None
    numbers = (StepNumber(checkpointed), StepNumber(committed), StepNumber(1))
    return Checkpoint(Epoch(epoch), *numbers, void, model_state=model_state)


class Owner:
    """One executor. answered: (step, how) in the order of the commits; removed: entries that left the inbox at once"""

    def __init__(self, recovery: Recovery | None = None, *, rows: int = 4, slots: int = 0, spare: int = 0) -> None:
        ready = [OldestSteps[QueuedStep](Oldest(0), rows)]
        self.state = OwnedSequences(recovery or Checkpoints(1), ready, slots=slots, spare=spare)
        self.commits: list[Commit] = []
        self.removed: list[str] = []
        self.loading: list[OwnedSequence] = []
        self.now_us = 0

    def take(self, event: ExecutorEvent) -> list[ExecutorAction]:
        """Takes an event in; returns what is left to be done."""
        self.now_us += 1
        actions = decide(self.state, event, self.now_us)
        phases = Counter(owned.phase for owned in self.state.by_id.values())
        assert phases == {phase: self.state.by_phase[phase] for phase in phases}
        assert len(self.state) == sum(self.state.by_phase[phase] for phase in OwnedPhase if phase is not ABSENT)
        for action in actions:
            match action:
                case Commit():
                    self.commits.append(action)
                case Remove():
                    self.removed += action.entries
                case LoadState():
                    self.loading.append(action.owned)
                case _:
                    pass
        return actions

    @property
    def answered(self) -> list[tuple[int, HowAnswered]]:
        return [(one.queued.step.step, one.how) for commit in self.commits for one in commit.answers]

    def owned(self, sequence: SequenceId = SEQUENCE) -> OwnedSequence:
        """A sequence that is owned."""
        return self.state.by_id[sequence]

    def restore(self, checkpoint: Checkpoint | None, sequence: SequenceId = SEQUENCE) -> None:
        """The checkpoint of a sequence comes, and is loaded at once."""
        owned = self.owned(sequence)
        self.state.next_fetches(1000, 1000)
        self.take(CheckpointFetched(owned, checkpoint))
        for one in self.loading:
            self.take(StateLoaded(one))
        self.loading.clear()

    def begin(self) -> RunBatch | None:
        """The next batch, if there is one."""
        self.now_us += 1
        batch = next_batch(self.state, InstanceIndex(0), self.now_us, was_busy=False)
        return batch if isinstance(batch, RunBatch) else None

    def stage(self) -> RunBatch | None:
        """The batch that follows the running one, if it is settled."""
        self.now_us += 1
        return staged_batch(self.state, InstanceIndex(0), self.now_us)

    def end(self, batch: RunBatch, *ends: RowEnd) -> None:
        """A batch has run; every step succeeds if the test does not say otherwise."""
        self.take(BatchDone(batch, ends or [RowEnd.DONE] * len(batch.members)))

    def run(self, *ends: RowEnd) -> list[int]:
        """Runs one batch: the numbers of its steps."""
        batch = self.begin()
        if batch is None:
            return []
        self.end(batch, *ends)
        return numbers(batch)

    def run_all(self) -> list[int]:
        """Runs what can run: the numbers of the steps, in order."""
        ran: list[int] = []
        while batch := self.run():
            ran += batch
        return ran


def numbers(batch: RunBatch) -> list[int]:
    """The numbers of a batch's steps."""
    return [member.queued.step.step for member in batch.members if member is not None]
