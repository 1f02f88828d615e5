"""One field of a record holds what no script writes, at some moment of the sequence's life, and calls come again late.

Whatever is called then, no script fails, and all who wait for a step hear something. Without damage each of them gets
one last answer, however late a call is repeated, and whatever was called since.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shared.contract.ids import Epoch, ExecutorId, GatewayId
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.store.script_sender import Call
from shared.store.script_values import (
    CommitCode,
    Ending,
    LedShard,
    Orphan,
    Rejection,
    StepAnswers,
    StepOutcome,
    Submission,
    SubmitCode,
    Submitted,
    Vacation,
)
from tests.scripted_mesh import ANSWER, GATEWAY, ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice"), ExecutorId("bob")
ONE = {"x": np.ones(1, np.float32)}
START, END, NONE, PAGEABLE = StepFlag.START, StepFlag.END, StepFlag.NONE, StepFlag.PAGEABLE
ON_THE_WAY = encode(ReplyMessage("1", number=1, more=True))
VALUES = [None, b"", b"-1", b"7.5", b"1e300", b"nan", b"9" * 30, b"nonsense", b"x" * 1000]
ACCEPTED = (SubmitCode.DELIVERED, SubmitCode.WAITING, SubmitCode.JOINED)
STORIES = 150


class Story:
    """The life of one sequence, drawn by a seed. waiting: tokens of all who were told to wait; calls: those made so
    far, but for the steps of gateways
    """

    def __init__(self, mesh: ScriptedMesh, seed: int, calls: Sequence[Call[Any]]) -> None:
        self.mesh, self.number, self.chance = mesh, seed + 1, random.Random(seed)
        self.waiting: list[str] = []
        self.told: list[str] = []
        self._sequence, (self._shard,) = mesh.sequence(self.number), mesh.keys.shards
        self._last: tuple[Submission, Submitted] | None = None
        self._calls = calls

    async def run(self, call: Call[Any]) -> Any:
        """Makes a call that a failure tells of."""
        outcome = await self.mesh.scripts.run(call)
        self.told.append(f"{call.script} {outcome}")
        return outcome

    async def again(self) -> None:
        """A call comes late, for the second time."""
        if self._calls:
            await self.run(self.chance.choice(self._calls))

    async def moves(self, count: int) -> None:
        rare = [self.again, self.cancel, self.assign, self.pause, self.resume, self.expire, self.end, self.orphan]
        rare += [self.take, self.sweep, self.page, self.attempt, self.lose, self.reload, self.reject, self.vacate]
        for _ in range(count):
            await self.chance.choice([*[self.ask] * 4, *[self.work] * 3, self.again, self.again, *rare])()

    async def damage(self) -> None:
        record = self.mesh.keys.sequence(self._sequence).record
        names = [name.decode() for name in await self.mesh.redis.hkeys(record)]
        # Who has joined, or left, stands in the record alone.
        names = [name for name in names if name[:2] not in ("j:", "a:")]
        if names:
            name, value = self.chance.choice(names), self.chance.choice(VALUES)
            await (self.mesh.redis.hdel(record, name) if value is None else self.mesh.redis.hset(record, name, value))
            self.told.append(f"{name} holds {value!r}")

    async def settle(self) -> None:
        """Whatever can still be done for the sequence is done."""
        for _ in range(6):
            await self.resume()
            await self.take(ALICE)
            await self.take(BOB)
            await self.assign(BOB)
            await self.work(BOB)
            await self.sweep()
        await self.expire()

    async def last_answers(self) -> Counter[str]:
        """How many each token got."""
        read = "return redis.call('XRANGE', KEYS[1], '-', '+')"
        entries = await self.mesh.redis.eval(read, 1, self.mesh.keys.replies(self._shard, GatewayId(GATEWAY)))
        pairs = [pair for _, flat in entries for pair in zip(flat[::2], flat[1::2], strict=True)]
        return Counter(token.decode() for token, reply in pairs if reply != ON_THE_WAY)

    # -- gateways -----------------------------------------------------------------------------------------------------

    async def ask(self, flags: StepFlag | None = None) -> None:
        draw = self.chance.choice
        step = self.mesh.submission(
            self.number,
            ONE,
            draw([NONE, NONE, NONE, START, END]) | PAGEABLE if flags is None else flags,
            request_id=draw(["", "a", "b"]),
            expected_step=draw([None, None, 1, 2, 3]),
            timeout_us=draw([0, 0, 60_000_000]),
            since_ms=draw([-1, -1, 1]),
        )
        accepted = await self.mesh.submit(step)
        self.told.append(f"{step.token} {step.flags!r} {accepted.code.name}")
        if accepted.code in ACCEPTED:
            self.waiting.append(step.token)
            self._last = step, accepted

    async def cancel(self) -> None:
        if self._last:
            self.told.append(f"cancel {await self.mesh.cancel(*self._last)}")

    async def end(self) -> None:
        reply = self.chance.choice([b"", ANSWER])
        await self.run(self.mesh.scripts.end([Ending(self._sequence, "")], tombstone=b"c", reply=reply))

    async def orphan(self) -> None:
        if self._last:
            orphan = Orphan(self._sequence, self._last[0].token, 100)
            await self.run(self.mesh.scripts.orphan([orphan], gateway=GATEWAY))

    # -- the leader ---------------------------------------------------------------------------------------------------

    async def assign(self, executor: ExecutorId = ALICE) -> None:
        self.told.append(f"assign {await self.mesh.assign(self.number, executor, slot=self.number)}")

    async def take(self, executor: ExecutorId = ALICE) -> None:
        await self.mesh.take_over(executor, lost=self.chance.random() < 0.7)
        self.told.append(f"{executor} is taken over")

    async def pause(self) -> None:
        self.told.append(f"pause {await self.mesh.pause(self.number)}")

    async def resume(self) -> None:
        await self.run(self.mesh.scripts.resume([self._sequence]))

    async def expire(self) -> None:
        await self._as_leader(self.mesh.scripts.expire, [self._sequence], tombstone_ms=10_000)

    async def sweep(self) -> None:
        await self._as_leader(self.mesh.scripts.sweep, [self._sequence])

    async def reject(self) -> None:
        entry = (await self.mesh.record(self.number)).get("be", "")
        await self._as_leader(self.mesh.scripts.reject, [Rejection(self._sequence, entry, ANSWER)], tombstone_ms=10_000)

    async def vacate(self) -> None:
        vacation = Vacation(self._sequence, await self._epoch(), self.chance.random() < 0.5)
        await self._as_leader(self.mesh.scripts.vacate, [vacation])

    async def _as_leader(self, script: Callable[..., Call[Any]], *args: Any, **more: Any) -> None:
        await self.run(script(*args, LedShard(self._shard, "sum", self.mesh.term), **more))

    async def _epoch(self) -> Epoch:
        epoch = (await self.mesh.record(self.number)).get("ep", "")
        return Epoch(int(epoch) if epoch.isdigit() else 0)

    # -- executors ----------------------------------------------------------------------------------------------------

    async def work(self, executor: ExecutorId = ALICE) -> None:
        """Runs what lies in the inbox, up to a refusal."""
        steps = {step.step: step for step in await self.mesh.steps(executor, self.number)}
        for _, step in sorted(steps.items()):
            if self.chance.random() < 0.3:
                keep, answers = self.chance.random() < 0.5, [(1, ON_THE_WAY), (2, ON_THE_WAY)]
                written = StepAnswers(step.sequence, step.epoch, step.step, step.gateway, step.token, keep, answers)
                await self.run(self.mesh.scripts.answers([written], executor))
            drawn = self.chance.choice([*[StepOutcome.DONE] * 4, *StepOutcome])
            unrun = StepOutcome.CANCELLED if step.cancelled else StepOutcome.GIVEN_UP if step.given_up else None
            keep = self.chance.random() < 0.7
            done = commit_of(step, outcome=unrun or drawn, entries=[step.entry], base=step.step, keep_reply=keep)
            (code,) = await self.mesh.committed(executor, done)
            self.told.append(f"{executor} commits {step.step}: {code.name}")
            if code not in (CommitCode.COMMITTED, CommitCode.BEFORE):
                return

    async def page(self) -> None:
        asked = [(self._sequence, await self._epoch())]
        await self.run(self.mesh.scripts.page(asked, shard=self._shard, executor=ALICE, model="sum"))

    async def attempt(self) -> None:
        await self.run(self.mesh.scripts.attempt(self._sequence, await self._epoch()))

    async def lose(self) -> None:
        if self.chance.random() < 0.2:
            await self.run(self.mesh.scripts.lose(self._sequence, ALICE, await self._epoch()))

    async def reload(self) -> None:
        about: dict[str, Any] = {"executor": ALICE, "model": "sum", "version": "1", "mark": "z", "tombstone_ms": 10_000}
        await self.run(self.mesh.scripts.reload([self._sequence], shard=self._shard, **about))


async def play(story: Story, *, damaged: bool) -> None:
    await story.ask(START | story.chance.choice([NONE, PAGEABLE]))
    await story.moves(story.chance.randint(0, 8))
    await (story.damage() if damaged else story.again())
    await story.moves(story.chance.randint(0, 4))
    await story.settle()


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("damaged", [False, True])
async def test_nobody_waits_in_vain(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, *, damaged: bool) -> None:
    run, calls = mesh.scripts.run, list[Call[Any]]()

    async def noted(call: Call[Any]) -> Any:
        if call.script != "submit":
            calls.append(call)
        return await run(call)

    monkeypatch.setattr(mesh.scripts, "run", noted)
    for seed in range(STORIES):
        calls.clear()
        story = Story(mesh, seed, calls)
        await play(story, damaged=damaged)

        heard = await story.last_answers()
        for token in story.waiting:
            assert heard[token] == 1 or (damaged and heard[token]), "\n".join([*story.told, f"{token}: {heard[token]}"])
        await mesh.redis.xtrim(mesh.keys.replies(mesh.keys.shards[0], GatewayId(GATEWAY)), maxlen=0)
