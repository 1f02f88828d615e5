"""Cancellations in any order against submit, assign, commit and takeover, by the real scripts on a real server.

The test plays gateway, scheduler and two executors (these with the real `decide`), by a seeded choice of moves.
Whatever the order: every accepted step is answered once; a step that was not cancelled runs once and in order, unless
it stands behind a cancelled one; and nothing is left of a sequence that is over, neither a slot nor a key.
SEEDS=n plays more games.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from executor.core.actions import Commit, ExecutorAction, HowAnswered, LoadState, RunBatch, StepAnswer
from executor.core.decide import decide, next_batch
from executor.core.events import (
    BatchDone,
    CheckpointFetched,
    ExecutorEvent,
    OwnershipOver,
    RowEnd,
    StateLoaded,
)
from executor.core.recovery import Checkpoints
from executor.core.sequence_batches import OldestSteps
from executor.core.state import OwnedSequences, QueuedStep, VoidCause
from executor.sequences.checkpoints import read_checkpoints
from shared.contract.errors import Code
from shared.contract.ids import ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex
from shared.contract.messages import (
    InboxStep,
    InferMessage,
    ReplyMessage,
    StepFlag,
    decode_reply,
    encode,
    inbox_entry,
)
from shared.contract.model_config import Oldest
from shared.contract.tensors import from_numpy, to_numpy
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.script_values import (
    Assignment,
    CancelCode,
    CommitCode,
    LedShard,
    StepCommit,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
)
from tests.scripted_mesh import GATEWAY, ScriptedMesh, commit_of

SEEDS = int(os.environ.get("SEEDS", "12"))
MOVES = 120
SLOTS = 2
IDS = (1, 2, 3, 4)
NOTHING = {"INPUT": np.zeros((1, 1), np.int32)}


@dataclass
class Accepted:
    """A step that the mesh has accepted. cancelled: its caller left."""

    submission: Submission
    outcome: Submitted
    flags: StepFlag
    cancelled: bool = False

    @property
    def step(self) -> int:
        """Its number."""
        return self.outcome.step

    @property
    def life(self) -> tuple[SequenceId, str]:
        """Which sequence of its id it belongs to."""
        return self.submission.sequence, self.outcome.birth


@dataclass
class Runner:
    """An executor: the real decisions, a running sum of one per step, and commits that may wait."""

    name: ExecutorId
    positions: dict[str, str]
    state: OwnedSequences = field(
        default_factory=lambda: OwnedSequences(Checkpoints(1), [OldestSteps[QueuedStep](Oldest(0), 4)])
    )
    sums: dict[SequenceId, int] = field(default_factory=dict[SequenceId, int])
    running: RunBatch | None = None
    commits: deque[StepCommit] = field(default_factory=deque[StepCommit])

    def take(self, event: ExecutorEvent) -> list[ExecutorAction]:
        """Takes an event in, and commits what is answered without the model; returns the other actions."""
        left: list[ExecutorAction] = []
        for action in decide(self.state, event, 0):
            match action:
                case Commit(batch=False):
                    for answer in action.answers:
                        assert answer.how is HowAnswered.CANCELLED or answer.cause is VoidCause.CANCELLED
                        outcome = StepOutcome.VOID if answer.cause else StepOutcome.CANCELLED
                        self.put(answer, outcome, ReplyMessage("1", error_code=Code.CANCELLED))
                case Commit():
                    for answer in action.answers:
                        self.ran(answer)
                case LoadState():
                    self.sums[action.owned.sequence] = int(to_numpy(action.checkpoint.states["n"])[0])
                    left += self.take(StateLoaded(action.owned))
                case _:
                    left.append(action)
        return left

    def ran(self, answer: StepAnswer) -> None:
        """The model adds one to the sum of its sequence."""
        step = answer.queued.step
        total = 1 if step.flags & StepFlag.START else self.sums[step.sequence] + 1
        self.sums[step.sequence] = total
        states = [("s:n", encode(from_numpy("n", np.array([total], np.int64))))]
        self.put(answer, StepOutcome.DONE, ReplyMessage("1", step=total), states)

    def put(self, answer: StepAnswer, outcome: StepOutcome, reply: ReplyMessage, states: Any = ()) -> None:
        step = answer.queued.step
        self.commits.append(commit_of(step, encode(reply), outcome, entries=answer.change.entries, checkpoint=states))


class Game:
    """One game's mesh and what is known of it."""

    def __init__(self, mesh: ScriptedMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self.commands = mesh.redis
        self.keys = mesh.keys
        self.chance = chance
        self.born = 0
        self.runners: list[Runner] = []
        self.accepted: list[Accepted] = []
        self.removed: set[tuple[SequenceId, str]] = set()
        self.open: set[int] = set()
        for _ in range(2):
            self.add_runner()

    def add_runner(self) -> None:
        self.born += 1
        name = ExecutorId(f"e{self.born}")
        self.runners.append(Runner(name, {self.keys.inbox(shard, name): "0-0" for shard in self.keys.shards}))

    # -- moves ----------------------------------------------------------------------------------------------------

    async def move(self) -> None:
        """Something happens."""
        moves = [self.submit] * 6 + [self.assign] * 3 + [self.read] * 4 + [self.run] * 4 + [self.flush] * 4
        await self.chance.choice([*moves, self.cancel, self.cancel, self.restore, self.restore, self.take_over])()

    async def submit(self) -> None:
        number = self.chance.choice(IDS)
        flags = StepFlag.NONE
        if number not in self.open or self.chance.random() < 0.1:
            flags |= StepFlag.START
        if self.chance.random() < 0.2:
            flags |= StepFlag.END
        submission = self.mesh.submission(number, NOTHING, flags)
        outcome = await self.mesh.submit(submission)
        if outcome.code < 0:
            assert outcome.code in {SubmitCode.NEVER_SEEN, SubmitCode.ENDED, SubmitCode.CANCELLED}, outcome
            assert StepFlag.START not in flags
            self.open.discard(number)
            return
        self.accepted.append(Accepted(submission, outcome, flags))
        (self.open.discard if StepFlag.END in flags else self.open.add)(number)

    async def cancel(self) -> None:
        candidates = [one for one in self.accepted[-12:] if not one.cancelled]
        if not candidates:
            return
        one = self.chance.choice(candidates)
        one.cancelled = True
        for _ in range(self.chance.choice((1, 1, 2))):
            code = await self.mesh.cancel(one.submission, one.outcome)
            if code is CancelCode.REMOVED:
                self.removed.add(one.life)

    async def assign(self) -> None:
        """Gives the oldest waiting sequence of a shard a free slot, if there is one."""
        shard = self.chance.choice(self.keys.shards)
        entries = await self.commands.xrange(self.keys.starts(shard, self.mesh.model))
        taken = await self.places()
        free = [(r.name, slot) for r in self.runners for slot in range(SLOTS) if (r.name, slot) not in taken]
        for (entry, fields), (executor, slot) in zip(entries, free, strict=False):
            sequence = SequenceId(fields[b"q"].decode())
            place = Assignment(sequence, entry.decode(), executor, InstanceIndex(0), SlotIndex(slot))
            call = self.mesh.scripts.assign([place], LedShard(shard, self.mesh.model, self.mesh.term))
            await self.mesh.scripts.run(call)

    async def places(self) -> set[tuple[ExecutorId, int]]:
        records = [await self.mesh.record(number) for number in IDS]
        held = [(ExecutorId(r["ow"]), int(r["sl"])) for r in records if r.get("st") == "l"]
        assert len(held) == len(set(held)), f"a slot is held twice: {held}"
        return set(held)

    async def read(self) -> None:
        runner = self.chance.choice(self.runners)
        news = await self.commands.xread(runner.positions, count=self.chance.choice((1, 2, 50)))
        for stream, entries in news or ():
            runner.positions[stream.decode()] = entries[-1][0].decode()
            for entry, fields in entries:
                await self.take(runner, stream, inbox_entry(entry, fields))

    async def take(self, runner: Runner, stream: bytes, item: Any) -> None:
        if isinstance(item, InboxStep):
            runner.take(QueuedStep(item, InferMessage(self.mesh.model, "1", "", 1, ()), 0, None))
            return
        runner.take(item)
        await self.commands.xdel(stream, item.entry)

    async def restore(self) -> None:
        runner = self.chance.choice(self.runners)
        wanted = runner.state.next_fetches(1000, 1000)
        found = await read_checkpoints(self.mesh.redis, self.keys, [owned.sequence for owned in wanted])
        for owned in wanted:
            runner.take(CheckpointFetched(owned, found.get(owned.sequence)))

    async def run(self) -> None:
        """A batch ends, and the next one begins."""
        runner = self.chance.choice(self.runners)
        if (batch := runner.running) is not None:
            runner.running = None
            runner.take(BatchDone(batch, [RowEnd.DONE] * len(batch.members)))
        found = next_batch(runner.state, InstanceIndex(0), 0, was_busy=False)
        runner.running = found if isinstance(found, RunBatch) else None

    async def flush(self) -> None:
        runner = self.chance.choice(self.runners)
        while runner.commits:
            step = runner.commits.popleft()
            (code,) = await self.mesh.committed(runner.name, step, idle_ms=600_000, tombstone_ms=600_000)
            assert code is not CommitCode.OUT_OF_ORDER
            if code in (CommitCode.OVER, CommitCode.REFUSED):
                runner.take(OwnershipOver(step.sequence, step.epoch))
            if self.chance.random() < 0.3:
                return

    async def take_over(self) -> None:
        """An executor is lost. Half of them wake up later: what they computed is committed too late."""
        runner = self.runners.pop(self.chance.randrange(len(self.runners)))
        self.add_runner()
        await self.mesh.take_over(runner.name, tombstone_ms=600_000)
        self.runners.append(runner)
        await self.flush_late(runner)

    async def flush_late(self, runner: Runner) -> None:
        self.runners.remove(runner)
        for step in runner.commits:
            late = await self.mesh.committed(runner.name, step, idle_ms=600_000, tombstone_ms=600_000)
            assert late in ([CommitCode.REFUSED], [CommitCode.BEFORE])

    # -- the end --------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Everybody does his part until every accepted step is answered."""
        for _ in range(400):
            if len(await self.replies()) >= len(self.accepted):
                break
            for runner in list(self.runners):
                for move in (self.assign, self.read, self.restore, self.run, self.flush):
                    others, self.runners = self.runners, [runner] if move != self.assign else self.runners
                    await move()
                    self.runners = others
        for runner in self.runners:
            others, self.runners = self.runners, [runner]
            for _ in range(3):
                await self.read()
            self.runners = others

    async def replies(self) -> list[tuple[str, ReplyMessage]]:
        return [
            (token.decode(), decode_reply(data))
            for shard in self.keys.shards
            for _, fields in await self.commands.xrange(self.keys.replies(shard, cast("Any", GATEWAY)))
            for token, data in fields.items()
            if token != b"opened"
        ]

    async def check(self) -> None:
        answers = await self.replies()
        assert {one.submission.token: 1 for one in self.accepted} == Counter(token for token, _ in answers)
        by_token = dict(answers)
        for life in {one.life for one in self.accepted}:
            steps = sorted((one for one in self.accepted if one.life == life), key=lambda one: one.step)
            self.check_life(steps, by_token, removed=life in self.removed)
        await self.check_nothing_is_left()

    def check_life(self, steps: list[Accepted], answers: dict[str, ReplyMessage], *, removed: bool) -> None:
        """One sequence from its first wait to its end, with all its STARTs."""
        first = steps[0].step
        assert [one.step for one in steps] == list(range(first, first + len(steps)))
        total, void = 0, False
        for one in steps:
            answer = answers[one.submission.token]
            if StepFlag.START in one.flags or one is steps[0]:
                total, void = 0, False
            total += 1
            if answer.error_code:
                assert (Code.CANCELLED, "") == (answer.error_code, answer.error)
                assert one.cancelled or void or removed, f"{one} was not to be cancelled"
                void = True
            else:
                assert not void and not removed, f"{one} ran behind a cancelled step"
                assert total == answer.step, f"{one}: the sum is wrong"

    async def check_nothing_is_left(self) -> None:
        """Live sequences have an owner that knows them, each slot was given back once, nothing waits."""
        records = {self.mesh.sequence(number): await self.mesh.record(number) for number in IDS}
        live = {sequence for sequence, record in records.items() if record.get("st") == "l"}
        assert {"l", "e", "c", None} >= {record.get("st") for record in records.values()}
        owned: list[bytes] = []
        released: list[tuple[bytes, bytes]] = []
        for shard in self.keys.shards:
            assert 0 == await self.commands.xlen(self.keys.starts(shard, self.mesh.model))
            released += await self.released(shard)
            async for key in self.commands.scan_iter(match=f"{self.keys.base(shard)}owned:*"):
                owned += await self.commands.smembers(key)
            async for key in self.commands.scan_iter(match=f"{self.keys.base(shard)}parked:*"):
                raise AssertionError(f"{key} is left")
            async for key in self.commands.scan_iter(match=f"{self.keys.base(shard)}inbox:*"):
                assert 0 == await self.commands.xlen(key), f"{key} holds entries"
        assert {str(sequence).encode() for sequence in live} == set(owned)
        assert len(owned) == len(set(owned))
        assert len(released) == len(set(released)), "a slot was given back twice"
        for record in records.values():
            assert not {"ca", "be", "dn"} & record.keys()

    async def released(self, shard: ShardId) -> list[tuple[bytes, bytes]]:
        feed = await self.commands.xrange(self.keys.feed(shard, self.mesh.model))
        return [(fields[b"q"], fields[b"e"]) for _, fields in feed if b"b" not in fields]


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_step_is_lost_doubled_or_answered_twice_and_no_slot_leaks(
    redis: Redis, key_prefix: str, seed: int
) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 2), "sum")
    await mesh.open()
    game = Game(mesh, random.Random(seed))
    for _ in range(MOVES):
        await game.move()
    await game.settle()

    await game.check()
    outcomes = Counter(reply.error_code or "done" for _, reply in await game.replies())
    assert {"done", "CANCELLED"} == set(outcomes)
