"""An executor of the fuzz: the real `SequenceTable` and the real ways of recovery, with as little as possible around
them. Each of its moves is one that the real one makes in a task of its own, so they may come in any order and late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from executor.core.recovery import Change, Checkpoints, Nothing
from executor.core.sequences import OwnedSequence, QueuedStep, SequenceTable, VoidCause
from executor.sequences.checkpoints import Checkpoint, read_checkpoints
from shared.contract.ids import Epoch, ExecutorId, SequenceId, StepNumber
from shared.contract.messages import InboxCancelled, InboxExpired, InboxStep, InferMessage, StepFlag, inbox_entry
from shared.statistics.tally import Compute, ModelLoad, execution, packed, success
from shared.store.commands import Redis
from shared.store.scripts import CommitCode, StepCommit, StepOutcome
from tests.simulation.script_bench import Bench, pairs
from tests.simulation.script_truth import MODEL, SHARD, VERSION, Done, State
from tests.simulation.store import Store

IDLE_MS, TOMBSTONE_MS = 1_000, 5_000
FAILING = 11
"""Requests whose number it divides fail, whoever runs them."""
LOAD = ModelLoad(MODEL, VERSION, "0")
ANSWERED = packed(success(rows=1, total_ns=1, queue_ns=1, compute=Compute(1, 1, 1)))
EXECUTED = packed(execution(batch_size=1, compute=Compute(1, 1, 1), ended_ms=1))
MESSAGE = InferMessage(MODEL, VERSION, "", 1, ())


Made = tuple[StepOutcome, "State | None", Change, "Sequence[tuple[str, bytes]]"]
"""What became of a step: outcome, what the model gave, what the commit changes of its recovery, its checkpoint."""


@dataclass(eq=False)
class Group:
    """Steps that an executor hands in together. is_counted: a call has made some of them final."""

    done: list[Done]
    commits: list[StepCommit]
    is_counted: bool = False


@dataclass(eq=False)
class Executor:
    """One that serves the model. lost: a leader has said so; it may not have heard of it."""

    bench: Bench
    name: ExecutorId
    recovery: Checkpoints
    table: SequenceTable = field(default_factory=SequenceTable)
    position: str = "0-0"
    states: dict[OwnedSequence, State | None] = field(default_factory=dict[OwnedSequence, "State | None"])
    restoring: list[OwnedSequence] = field(default_factory=list[OwnedSequence])
    fetched: list[tuple[OwnedSequence, Checkpoint | None]] = field(
        default_factory=list[tuple[OwnedSequence, "Checkpoint | None"]]
    )
    groups: list[Group] = field(default_factory=list[Group])
    lost: bool = False
    emptied: bool = False

    def forget(self, sequence: SequenceId, epoch: Epoch) -> None:
        """It is over, or somebody else's."""
        gone = self.table.drop(sequence, epoch)
        if gone is not None:
            self.states.pop(gone, None)

    def read_inbox(self, count: int = 3) -> None:
        """Takes entries in; now and then all of them once more."""
        if self.bench.chance.random() < 0.05:
            self.position = "0-0"
        stream = self.bench.keys.inbox(SHARD, self.name)
        entries = self.bench.do("XRANGE", stream, f"({self.position}", "+", "COUNT", count)
        gone: list[str] = []
        for entry, flat in entries:
            item = inbox_entry(entry, dict(pairs(flat)))
            self.position = item.entry
            self.bench.tell(f"{self.name} reads {item.entry} {type(item).__name__} {item.sequence} epoch {item.epoch}")
            if isinstance(item, InboxStep):
                gone += self.accept(item)
                continue
            gone.append(item.entry)
            owned = self.table.get(item.sequence)
            if isinstance(item, InboxCancelled):
                self.table.cancel(item.sequence, item.epoch, item.step)
            else:
                if isinstance(item, InboxExpired) and owned is not None and owned.epoch == item.epoch:
                    gone += owned.entries
                self.forget(item.sequence, item.epoch)
        if gone:
            self.bench.do("XDEL", stream, *gone)

    def accept(self, step: InboxStep) -> Sequence[str]:
        """As `SequenceModel.accept`."""
        known = self.table.get(step.sequence)
        owned = self.table.accept(QueuedStep(step, MESSAGE, 0, ()))
        if owned is None:
            return self.table.overtaken(step)
        if owned is not known and owned.restoring and not owned.held:
            self.restoring.append(owned)
        return ()

    def attempt(self) -> None:
        """A suspected sequence has its turn."""
        held = [owned for owned in self.table.all if owned.held]
        if held:
            owned = held[0]
            if self.bench.run(self.bench.scripts.attempt(owned.sequence, owned.epoch)):
                owned.held = False
                if owned.restoring:
                    self.restoring.append(owned)
            else:
                self.forget(owned.sequence, owned.epoch)

    def fetch(self) -> None:
        """Asks for a record and its checkpoint; the answer may be heard late."""
        while self.restoring:
            owned = self.restoring.pop(0)
            asked = read_checkpoints(cast("Redis", Reader(self.bench.store)), self.bench.keys, [owned.sequence])
            self.fetched.append((owned, _result(asked).get(owned.sequence)))

    def restore(self) -> None:
        """As `SequenceModel.restored`."""
        for owned, found in self.fetched:
            if self.table.get(owned.sequence) is not owned:
                continue
            if found is None or found.restored.epoch != owned.epoch:
                self.forget(owned.sequence, owned.epoch)
                continue
            if found.is_over:
                self.forget(owned.sequence, owned.epoch)
                if owned.entries:
                    self.bench.do("XDEL", self.bench.keys.inbox(SHARD, self.name), *owned.entries)
                continue
            self.table.seat(owned)
            self.states[owned] = _state(found.model_state)
            self.table.restored(owned.sequence, found.restored)
        self.fetched.clear()

    def run_step(self) -> None:
        """The model runs for one to three sequences, in one batch; what needs no model is answered."""
        group = Group([], [])
        ready = [owned for owned in self.table.all if owned.head is not None]
        for owned in self.bench.chance.sample(ready, min(len(ready), self.bench.chance.randint(1, 3))):
            self.settle_step(owned, group)
        if group.done:
            self.groups.append(group)

    def settle_step(self, owned: OwnedSequence, group: Group) -> None:
        """As `InstanceLoop`: begins and concludes the head of a sequence."""
        queued, replays = owned.head, owned.replays
        assert queued is not None
        begins = StepFlag.START in queued.step.flags
        is_run = not owned.head_is_cancelled and (owned.void is None or begins)
        made = self.run_model(owned, queued) if is_run else self.pass_over(owned, queued)
        if replays:
            return
        outcome, state, settled, checkpoint = made
        step, (request, keeps) = queued.step, request_of(queued)
        reply = f"{request} {outcome.name} {state}".encode()
        group.done.append(Done(owned.sequence, owned.epoch, step.step, request, step.flags, outcome, state, reply))
        group.commits.append(
            StepCommit(
                sequence=owned.sequence,
                epoch=owned.epoch,
                step=step.step,
                flags=step.flags,
                outcome=outcome,
                gateway=step.gateway,
                token=step.token,
                reply=reply,
                keep_reply=keeps,
                entries=settled.entries,
                base=settled.base if is_run else None,
                checkpoint=checkpoint,
                counts=ANSWERED,
                execution=EXECUTED if is_run and not any(one.execution for one in group.commits) else b"",
            )
        )

    def run_model(self, owned: OwnedSequence, queued: QueuedStep) -> Made:
        """What the model makes of a step: its requests so far, and this one."""
        before, replays, begins = self.states.get(owned), owned.replays, StepFlag.START in queued.step.flags
        request, _ = request_of(queued)
        fails = request % FAILING == 0
        state = before if fails else (*(() if begins else before or ()), request)
        self.states[owned] = state
        self.table.begin(owned)
        recovery = self.recovery if owned.sequence in self.bench.durable else Nothing()
        saves = recovery.is_due(owned) and StepFlag.END not in queued.step.flags and not fails
        self.table.conclude(owned, failed_start=begins and fails and not replays, started=begins and not fails)
        checkpoint = (("m", repr(state).encode()),) if saves else ()
        if replays:
            return StepOutcome.DONE, state, Change(), ()
        if fails:
            return StepOutcome.FAILED, None, recovery.failed(owned, queued, saved=False), ()
        return StepOutcome.DONE, state, recovery.succeeded(owned, queued), checkpoint

    def pass_over(self, owned: OwnedSequence, queued: QueuedStep) -> Made:
        """A step that is answered without the model."""
        outcome = StepOutcome.LOST if owned.void is VoidCause.LOST else StepOutcome.VOID
        dropped = None
        if owned.head_is_cancelled:
            outcome = StepOutcome.GIVEN_UP if queued.step.given_up else StepOutcome.CANCELLED
            dropped = VoidCause.LOST if queued.step.given_up else VoidCause.CANCELLED
        replays = owned.replays
        self.table.begin(owned)
        entries = () if replays else owned.closed()
        self.table.conclude(owned, dropped=dropped)
        return outcome, None, Change(entries), ()

    def hand_in(self) -> None:
        """The oldest group that is not final; perhaps twice, perhaps after a younger one that came too early."""
        groups = self.groups
        if not groups:
            return
        first = groups.pop(0)
        if groups and self.bench.chance.random() < 0.2:
            self.commit(groups[0], may_be_early=True)
        codes = self.commit(first)
        for _ in range(self.bench.chance.choice((0, 0, 0, 1, 2))):
            codes = self.commit(first)
        for done, code in zip(first.done, codes, strict=True):
            if code in (CommitCode.COMMITTED, CommitCode.BEFORE):
                self.table.committed(done.sequence, Epoch(done.epoch), StepNumber(done.step))
            else:
                self.forget(done.sequence, Epoch(done.epoch))

    def hand_in_all(self) -> None:
        """Until all that it has is final, or refused."""
        while self.groups:
            self.hand_in()

    def commit(self, group: Group, *, may_be_early: bool = False) -> list[CommitCode]:
        """One call. may_be_early: the group before has not been final yet."""
        births = [self.bench.truth.record(done.sequence).get(b"bn", b"") for done in group.done]
        call = self.bench.scripts.commit(
            group.commits,
            shard=SHARD,
            executor=self.name,
            model=MODEL,
            idle_ms=IDLE_MS,
            tombstone_ms=TOMBSTONE_MS,
            load=LOAD,
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
        if self.bench.truth.news and not group.is_counted:
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


def _state(kept: bytes | None) -> State | None:
    return None if kept is None else tuple(int(word) for word in kept.decode().strip("()").split(",") if word.strip())


def _result(coroutine: Any) -> Any:
    """Of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")
