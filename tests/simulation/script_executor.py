"""An executor of the fuzz: the real `decide` and the real ways of recovery, with as little as possible around them.
Each of its moves is one that the real one makes in a task of its own, so they may come in any order and late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from executor.core.actions import (
    BatchMember,
    Commit,
    ExecutorAction,
    HowAnswered,
    LoadState,
    Remove,
    RunBatch,
    StepAnswer,
)
from executor.core.decide import decide, next_batch
from executor.core.events import (
    BatchDone,
    CheckpointFetched,
    ExecutorEvent,
    OwnershipOver,
    RowEnd,
    StateLoaded,
    StepEnded,
    StepsFinal,
    SuspectTried,
)
from executor.core.recovery import Change, Checkpoints, KeptSteps, Recovery
from executor.core.sequence_batches import OldestSteps
from executor.core.state import Checkpoint, OwnedPhase, OwnedSequence, OwnedSequences, QueuedStep, VoidCause
from executor.sequences.checkpoints import read_checkpoints
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, StepNumber, entry_key
from shared.contract.messages import InboxStep, InferMessage, StepFlag, inbox_entry
from shared.contract.model_config import Oldest
from shared.contract.state_fields import GrownState, Parts
from shared.statistics.tally import ModelLoad, Timings, execution, packed, success
from shared.store.commands import Redis
from shared.store.script_values import CommitCode, StepAnswers, StepCommit, StepOutcome
from tests.simulation.script_bench import Bench, pairs
from tests.simulation.script_truth import MODEL, SHARD, VERSION, Done, State
from tests.simulation.store import Store

IDLE_MS, TOMBSTONE_MS = 1_000, 5_000
FAILING = 11
"""Requests whose number it divides fail, whoever runs them."""
UNREADABLE = 0.01
"""The share of records that an executor cannot read."""
ANSWERS = 4
"""A decoupled model gives fewer answers before the last one: as many as a request's number says, modulo this."""
LOAD = ModelLoad(MODEL, VERSION, "0")
ANSWERED = packed(success(rows=1, total_ns=1, queue_ns=1, compute=Timings(1, 1, 1)))
EXECUTED = packed(execution(batch_size=1, compute=Timings(1, 1, 1), ended_ms=1))
Ran = tuple[bool, State | None, GrownState | None]
"""What the model made of a step: whether it failed, the requests so far with this one, and the checkpoint."""
MESSAGE = InferMessage(MODEL, VERSION, "", 1, ())


@dataclass(frozen=True)
class Mixed(Recovery):
    """The recovery of sequences of which the mesh holds the state of some."""

    durable: frozenset[SequenceId]
    checkpoints: Checkpoints

    def _of(self, step: InboxStep) -> Recovery:
        return self.checkpoints if step.sequence in self.durable else Recovery()

    def is_due(self, kept: KeptSteps, step: InboxStep) -> bool:
        return self._of(step).is_due(kept, step)

    def succeeded(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        return self._of(step).succeeded(kept, step, saved=saved)

    def failed(self, kept: KeptSteps, step: InboxStep, *, saved: bool) -> Change:
        return self._of(step).failed(kept, step, saved=saved)


@dataclass(eq=False)
class Group:
    """Steps that an executor hands in together.

    is_counted  a call has made some of them final
    came_early  that call came before the one of the group before
    """

    done: list[Done]
    commits: list[StepCommit]
    is_counted: bool = False
    came_early: bool = False


@dataclass(eq=False)
class OpenStep:
    """A step whose answers are written bit by bit.

    answers  all but the last one, in their order; written: so many of them are
    """

    member: BatchMember
    end: RowEnd
    state: State | None
    grown: GrownState | None
    answers: Sequence[bytes]
    written: int = 0

    @property
    def is_silent(self) -> bool:
        """Nothing more of it is written: its callers have gone, or it was answered before a takeover."""
        owned = self.member.owned
        return owned.replays or self.member.queued.step.step in owned.cancelled


@dataclass(eq=False)
class Executor:
    """One that serves the model, whose states grow by one request with each step.

    saved  how many requests of a state the last checkpoint holds
    lost   a leader has said so; it may not have heard of it
    looked_at  the inbox was looked at up to this entry while its sequences were taken
    older      up to this entry the inbox holds what an earlier load may have committed
    was_late   it has asked for a sequence that had another owner by then, or was another one, or could not read it
    mark       of its load of the model, one of the marks; "" if states may be those of any load
    """

    bench: Bench
    name: ExecutorId
    recovery: Checkpoints
    marks: Sequence[str]
    mark: str
    position: str = "0-0"
    states: dict[OwnedSequence, State | None] = field(default_factory=dict[OwnedSequence, "State | None"])
    saved: dict[OwnedSequence, int] = field(default_factory=dict[OwnedSequence, int])
    fetched: list[tuple[OwnedSequence, Checkpoint | None]] = field(
        default_factory=list[tuple[OwnedSequence, "Checkpoint | None"]]
    )
    loaded: list[OwnedSequence] = field(default_factory=list[OwnedSequence])
    running: RunBatch | None = None
    open: list[OpenStep] = field(default_factory=list[OpenStep])
    groups: list[Group] = field(default_factory=list[Group])
    leaving: list[tuple[SequenceId, Epoch]] = field(default_factory=list[tuple[SequenceId, Epoch]])
    lost: bool = False
    emptied: bool = False
    looked_at: str = "0-0"
    older: str = "0-0"
    was_late: bool = False

    def __post_init__(self) -> None:
        mixed = Mixed(self.bench.durable, self.recovery)
        steps = OldestSteps[QueuedStep](Oldest(0), 3)
        self.state = OwnedSequences(mixed, [steps], self.mark, one_by_one=self.bench.decoupled)

    def take(self, event: ExecutorEvent) -> list[ExecutorAction]:
        """Takes an event in and carries out what needs no batch; returns the other actions."""
        left: list[ExecutorAction] = []
        for action in decide(self.state, event, self.bench.passed_us):
            match action:
                case LoadState():
                    state = self.states[action.owned] = _state(action.checkpoint)
                    self.saved[action.owned] = len(state)
                    self.loaded.append(action.owned)
                case Commit(batch=False):
                    self.answered(action)
                case Remove():
                    if action.entries:
                        self.bench.do("XDEL", self.bench.keys.inbox(SHARD, self.name), *action.entries)
                case _:
                    left.append(action)
        return left

    def read_inbox(self, count: int = 3) -> None:
        """Takes entries in; now and then all of them once more."""
        if self.bench.chance.random() < 0.05:
            self.position = "0-0"
        stream = self.bench.keys.inbox(SHARD, self.name)
        entries = self.bench.do("XRANGE", stream, f"({self.position}", "+", "COUNT", count)
        for entry, flat in entries:
            item = inbox_entry(entry, dict(pairs(flat)))
            self.position = item.entry
            self.bench.tell(f"{self.name} reads {item.entry} {type(item).__name__} {item.sequence} epoch {item.epoch}")
            if isinstance(item, InboxStep):
                is_older = entry_key(item.entry) <= entry_key(self.older)
                self.take(QueuedStep(item, MESSAGE, 0, (), is_older=is_older))
            else:
                self.take(item)
                self.bench.do("XDEL", stream, item.entry)

    def attempt(self) -> None:
        """A suspected sequence has its turn."""
        if held := self.state.suspects:
            owned = held[0]
            if self.bench.run(self.bench.scripts.attempt(owned.sequence, owned.epoch)):
                self.take(SuspectTried(owned))
            else:
                self.take(OwnershipOver(owned.sequence, owned.epoch))

    def fetch(self) -> None:
        """Asks for records and checkpoints; the answers may be heard late."""
        for owned in self.state.next_fetches(64, 16):
            asked = read_checkpoints(cast("Redis", Reader(self.bench.store)), self.bench.keys, [owned.sequence])
            self.fetched.append((owned, _result(asked).get(owned.sequence)))

    def restore(self) -> None:
        """Hears what it asked for; the engine takes the states."""
        fetched, self.fetched = self.fetched, []
        for owned, found in fetched:
            read = found if found is not None and self.bench.chance.random() >= UNREADABLE else None
            self.was_late |= read is None or read.epoch != owned.epoch
            if read is None:
                self.lose(owned)
            self.take(CheckpointFetched(owned, read))
        loaded, self.loaded = self.loaded, []
        for owned in loaded:
            self.take(StateLoaded(owned))

    def lose(self, owned: OwnedSequence) -> None:
        """It cannot read what Redis holds of a sequence, or the sequence waits for an owner."""
        lost = self.bench.run(self.bench.scripts.lose(owned.sequence, self.name, owned.epoch))
        self.bench.tell(f"{self.name} loses {owned.sequence} epoch {owned.epoch}: {lost}")
        self.bench.truth.lost(owned.sequence, self.name, owned.epoch, lost=lost)

    def run_step(self) -> None:
        """A batch ends, and the next one begins."""
        if (batch := self.running) is not None:
            self.running = None
            rows = [self.run_model(member) if member is not None else None for member in batch.members]
            ends = [None if row is None else RowEnd.FAILED if row[0] else RowEnd.DONE for row in rows]
            if self.bench.decoupled:
                ends = self.left_open(batch, rows, ends)
            self.concluded(BatchDone(batch, ends), rows)
        found = next_batch(self.state, InstanceIndex(0), self.bench.passed_us, was_busy=batch is not None)
        self.running = found if isinstance(found, RunBatch) else None

    def concluded(self, event: BatchDone | StepEnded, rows: Sequence[Ran | None]) -> None:
        """Steps that the model ran are handed in together."""
        for action in decide(self.state, event, self.bench.passed_us):
            if not isinstance(action, Commit):
                continue
            if any(answer.how is not HowAnswered.RAN for answer in action.answers):
                self.answered(action)
                continue
            group = Group([], [])
            for answer in action.answers:
                fails, state, grown = rows[answer.row] or (False, None, None)
                outcome = StepOutcome.FAILED if fails else StepOutcome.DONE
                self.add(group, answer, outcome, None if fails else state, grown)
            if group.done:
                self.groups.append(group)

    def left_open(
        self, batch: RunBatch, rows: Sequence[Ran | None], ends: Sequence[RowEnd | None]
    ) -> list[RowEnd | None]:
        """The steps of a decoupled model's batch end later. What the model says is the same whoever runs it."""
        for member, row, end in zip(batch.members, rows, ends, strict=True):
            if member is None or row is None or end is None or member.owned.phase is not OwnedPhase.RUNNING:
                continue
            request, _ = request_of(member.queued)
            # START that fails has no state, whatever state the engine had before it.
            told = None if end is RowEnd.FAILED and member.queued.step.flags & StepFlag.START else row[1]
            answers = [b"%d answer %d %s" % (request, n, str(told).encode()) for n in range(1, request % ANSWERS + 1)]
            self.open.append(OpenStep(member, end, row[1], row[2], answers))
        return [None if end is None else RowEnd.OPEN for end in ends]

    def give_answers(self) -> None:
        """Writes some answers of some open steps, now and then once more what was written before; ends a step of which
        all are written.
        """
        chance, now = self.bench.chance, list[OpenStep]()
        self.open = [one for one in self.open if one.member.owned.phase is OwnedPhase.RUNNING]
        for one in self.open:
            if not one.is_silent and one.written < len(one.answers) and chance.random() < 0.8:
                now.append(one)
            elif one.is_silent or one.written == len(one.answers):
                self.open = [other for other in self.open if other is not one]
                self.concluded(StepEnded(one.member, one.end), [(one.end is RowEnd.FAILED, one.state, one.grown)])
        if now:
            self.write_answers(now)

    def write_answers(self, steps: Sequence[OpenStep]) -> None:
        """One call; perhaps it is sent again."""
        chance, truth, calls = self.bench.chance, self.bench.truth, list[StepAnswers]()
        for one in steps:
            step, (_, keeps) = one.member.queued.step, request_of(one.member.queued)
            first = chance.randint(0, one.written) if chance.random() < 0.2 else one.written
            one.written = chance.randint(one.written + 1, len(one.answers))
            answers = [(number + 1, one.answers[number]) for number in range(first, one.written)]
            calls.append(StepAnswers(step.sequence, step.epoch, step.step, step.gateway, step.token, keeps, answers))
        for _ in range(chance.choice((1, 1, 1, 2))):
            births = [truth.record(one.sequence).get(b"bn", b"") for one in calls]
            call = self.bench.scripts.answers(calls, self.name, kept_bytes=self.bench.kept_bytes)
            for one, step, birth, written in zip(steps, calls, births, self.bench.run(call), strict=True):
                numbers = [number for number, _ in step.answers]
                self.bench.tell(f"{self.name} answers {step.sequence} step {step.step} with {numbers}: {written}")
                truth.answered_one_by_one(self.name, step, birth, written=written)
                if not written:
                    self.open = [other for other in self.open if other is not one]

    def run_model(self, member: BatchMember) -> Ran:
        owned, queued = member.owned, member.queued
        before, begins = self.states.get(owned), bool(queued.step.flags & StepFlag.START)
        request, _ = request_of(queued)
        fails = request % FAILING == 0
        state = before if fails else (*(() if begins else before or ()), request)
        if owned.phase is not OwnedPhase.RUNNING:
            # It was dropped while the batch ran: nothing of this is committed.
            return fails, state, None
        self.states[owned] = state
        if begins and not fails:
            self.saved.pop(owned, None)
        if fails or not member.save:
            return fails, state, None
        assert state is not None
        saved, self.saved[owned] = self.saved.get(owned), len(state)
        return fails, state, _grown(state, saved)

    def leave(self) -> None:
        """Pages some of its sequences, whatever they do; or asks once more what it asked before, of which it has not
        heard.
        """
        if self.bench.chance.random() < 0.5:
            chosen = [owned for owned in self.state.by_id.values() if self.bench.chance.random() < 0.5]
            self.leaving = [(owned.sequence, owned.epoch) for owned in chosen]
        call = self.bench.scripts.page(self.leaving, shard=SHARD, executor=self.name, model=MODEL)
        for (sequence, epoch), is_paged in zip(self.leaving, self.bench.run(call), strict=True):
            self.bench.tell(f"{self.name} pages {sequence} epoch {epoch}: {is_paged}")
            if is_paged:
                self.bench.truth.paged(sequence, self.name, epoch)
                self.take(OwnershipOver(sequence, epoch))

    def reload(self) -> None:
        """The model is loaded anew, perhaps from other files, before the old load has finished what was accepted: idle
        sequences end whose states are of another load, and the inbox is read again.
        """
        if self.bench.chance.random() < 0.5:
            self.mark = self.bench.chance.choice(self.marks)
            self.states, self.saved = {}, {}
            self.fetched, self.loaded, self.running, self.open, self.groups = [], [], None, [], []
            self.__post_init__()
            last = self.bench.do("XREVRANGE", self.bench.keys.inbox(SHARD, self.name), "+", "-", "COUNT", 1)
            self.older = last[0][0].decode() if last else "0-0"
            self.bench.truth.forgotten(self.name)
        owned = self.bench.do("SMEMBERS", self.bench.keys.owned(SHARD, self.name, MODEL))
        sequences = [SequenceId(name.decode()) for name in sorted(owned)]
        call = self.bench.scripts.reload(
            sequences,
            shard=SHARD,
            executor=self.name,
            model=MODEL,
            version=VERSION,
            mark=self.mark,
            tombstone_ms=TOMBSTONE_MS,
        )
        for sequence, ended in zip(sequences, self.bench.run(call), strict=True):
            self.bench.tell(f"{self.name} ends {sequence} if it is of another load than {self.mark!r}: {ended}")
            self.bench.truth.outdated(sequence, self.name, self.mark, ended=ended)
        self.position = "0-0"

    def answered(self, commit: Commit) -> None:
        """Steps that are answered without the model."""
        group = Group([], [])
        for answer in commit.answers:
            match answer.how:
                case HowAnswered.GIVEN_UP:
                    outcome = StepOutcome.GIVEN_UP
                case HowAnswered.CANCELLED:
                    outcome = StepOutcome.CANCELLED
                case _:
                    outcome = StepOutcome.LOST if answer.cause is VoidCause.LOST else StepOutcome.VOID
            self.add(group, answer, outcome, None, None)
        self.groups.append(group)

    def add(
        self,
        group: Group,
        answer: StepAnswer,
        outcome: StepOutcome,
        state: State | None,
        grown: GrownState | None,
    ) -> None:
        """Puts a step's commit into a group."""
        step, (request, keeps) = answer.queued.step, request_of(answer.queued)
        reply = f"{request} {outcome.name} {state}".encode()
        flags = StepFlag(step.flags)
        group.done.append(Done(step.sequence, step.epoch, step.step, request, flags, outcome, state, reply, self.mark))
        is_run = answer.how is HowAnswered.RAN
        group.commits.append(
            StepCommit(
                sequence=step.sequence,
                epoch=step.epoch,
                step=step.step,
                flags=step.flags | StepFlag.STREAMED if self.bench.decoupled else step.flags,
                outcome=outcome,
                gateway=step.gateway,
                token=step.token,
                reply=reply,
                keep_reply=keeps,
                entries=answer.change.entries,
                base=answer.change.base,
                checkpoint=grown.fields if grown is not None else (),
                anew=grown is not None and grown.anew,
                entry=step.entry,
                counts=ANSWERED,
                execution=EXECUTED if is_run and not any(one.execution for one in group.commits) else b"",
            )
        )

    def hand_in(self) -> None:
        """The oldest group that is not final; perhaps twice, perhaps after a younger one that came too early."""
        groups = self.groups
        if not groups:
            return
        first = groups.pop(0)
        if groups and self.bench.chance.random() < 0.2:
            self.commit(groups[0], may_be_early=True)
        codes = self.commit(first)
        if self.bench.chance.random() < 0.05:
            # Its answer is lost, and it is some time before it is sent again.
            groups.insert(0, first)
            return
        for _ in range(self.bench.chance.choice((0, 0, 0, 1, 2))):
            codes = self.commit(first)
        for done, code in zip(first.done, codes, strict=True):
            if code in (CommitCode.COMMITTED, CommitCode.BEFORE):
                self.take(StepsFinal([(done.sequence, Epoch(done.epoch), StepNumber(done.step))]))
            else:
                self.take(OwnershipOver(done.sequence, Epoch(done.epoch)))

    def hand_in_all(self) -> None:
        """Until all that it has is final, or refused."""
        while self.groups or self.open:
            self.give_answers()
            self.hand_in()

    def commit(self, group: Group, *, may_be_early: bool = False) -> list[CommitCode]:
        """One call. may_be_early: the group before has not been final yet."""
        records = [self.bench.truth.record(done.sequence) for done in group.done]
        births = [record.get(b"bn", b"") for record in records]
        call = self.bench.scripts.commit(
            group.commits,
            shard=SHARD,
            executor=self.name,
            load=LOAD,
            idle_ms=IDLE_MS,
            tombstone_ms=TOMBSTONE_MS,
            mark=self.mark,
            journal=self.bench.journal,
        )
        codes = self.bench.run(call)
        for done, code in zip(group.done, codes, strict=True):
            self.bench.tell(
                f"{self.name} commits {done.sequence} step {done.step} epoch {done.epoch} "
                f"{done.outcome.name} {done.state}: {code.name}"
            )
        if not may_be_early and CommitCode.OUT_OF_ORDER in codes:
            self.bench.truth.violate(f"{self.name}: {[done.step for done in group.done]} came out of order: {codes}")
        self.bench.truth.committed(self.name, group.done, codes, births)
        # No service hands a group in before the one before it. Where that made a part of it final, and no record tells
        # of that part any more, no call can know that the group was counted.
        is_counted_again = group.came_early and not any(map(_was_committed, group.commits, records))
        group.came_early |= may_be_early and bool(self.bench.truth.news)
        if self.bench.truth.news and (not group.is_counted or is_counted_again):
            group.is_counted = True
            self.bench.truth.executions += any(one.execution for one in group.commits)
        return codes


class Reader:
    """What `read_checkpoints` needs of a client, on the twin, without a loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commands: list[list[bytes]] = []

    def pipeline(self, *, transaction: bool) -> Self:
        assert not transaction
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands = []

    def hmget(self, key: str, fields: Sequence[str]) -> None:
        self._commands.append([b"HMGET", key.encode(), *(name.encode() for name in fields)])

    def hgetall(self, key: str) -> None:
        self._commands.append([b"HGETALL", key.encode()])

    async def execute(self) -> list[Any]:
        replies = [self._store.execute(command) for command in self._commands]
        return [r if c[0] == b"HMGET" else dict(pairs(r)) for c, r in zip(self._commands, replies, strict=True)]


def request_of(queued: QueuedStep) -> tuple[int, bool]:
    """A step's request, and whether its reply is to be kept."""
    number, keeps = queued.step.message.split()
    return int(number), keeps == b"1"


def _was_committed(step: StepCommit, record: dict[bytes, bytes]) -> bool:
    """Whether the record, as it was before a call, tells that a step of the call was committed before."""
    if not record:
        return bool(step.flags & StepFlag.ALONE)
    return int(record.get(b"ep", 0)) == step.epoch and step.step <= int(record.get(b"cm", 0))


def _grown(state: State, saved: int | None) -> GrownState:
    """What a checkpoint writes. saved: as of `Executor.saved`; None if no checkpoint of this run is known"""
    parts = [request.to_bytes(8, "little") for request in state[saved or 0 :]]
    return GrownState("h", Parts(0, 1, "INT64", (len(state),)), saved or 0, parts, anew=saved is None)


def _state(checkpoint: Checkpoint) -> State:
    raw = checkpoint.states["h"].raw
    return tuple(int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8))


def _result(coroutine: Any) -> Any:
    """Of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")
