"""Incidents that need a process to die, or a counter to stand, at one particular place: call by call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

import scheduler.effects
from scheduler.core.actions import ReclaimPart
from scheduler.core.events import Reclaimed
from scheduler.effects import EffectPerformer
from scheduler.mesh import MeshAccess
from shared.contract.ids import ExecutorId, InstanceIndex, SchedulerId, SlotIndex, Term, sequence_id
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.script_values import Assignment, CommitCode, LedShard, Submission, SubmitCode
from shared.store.scripts import Scripts
from shared.traces.tracing import Tracing
from tests.scheduler.stage import MODEL, Stage, step_numbers
from tests.scripted_mesh import ScriptedMesh, commit_of

EXECUTOR = ExecutorId("e-1")
SEQUENCES = 5
CALLS_MAX = 40


class Killed(Exception):
    """The leader's process is gone."""


class Mortal(Scripts):
    """A leader's scripts, of which the server carries out so many calls; with the next one the leader is dead."""

    def __init__(self, redis: Redis, keys: Keyspace, calls: int) -> None:
        super().__init__(redis, keys)
        self.left = calls

    async def run_all(self, calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        outcomes: list[Any] = []
        for call in calls:
            if self.left == 0:
                raise Killed
            self.left -= 1
            outcomes += await super().run_all([call], link)
        return outcomes


@pytest.fixture
async def stage(redis_server: str, key_prefix: str) -> AsyncIterator[Stage]:
    stage = Stage(redis_server, key_prefix)
    await stage.publish()
    yield stage
    await stage.close()


async def owned_by(stage: Stage, executor: ExecutorId, numbers: Sequence[int]) -> None:
    """Sequences of two accepted steps each, in the slots of an executor."""
    for slot, number in enumerate(numbers):
        await stage.submit(number, start=True)
        await stage.submit(number)
        sequence = sequence_id(MODEL, "", number)
        entry = (await stage.record(number))["be"]
        place = Assignment(sequence, entry, executor, InstanceIndex(0), SlotIndex(slot))
        term = await stage.term()
        (epoch,) = await stage.scripts.run(
            stage.scripts.assign([place], LedShard(stage.keys.shard_of(sequence), MODEL, term))
        )
        assert epoch


@pytest.mark.leaves_sequences
async def test_taskiq_redis_131_a_leader_killed_anywhere_in_a_reclaim_leaves_nothing_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There (taskiq-python/taskiq-redis#131) a worker that was killed while it reclaimed the messages of a dead one had
    a lock without a timeout: nobody ever reclaimed them. Here one leader after the other is killed after its first,
    second, ... script call, each in the takeover of another executor; the next leader finishes all of them."""
    monkeypatch.setattr(scheduler.effects, "RECLAIM_COUNT", 2)
    (term,) = await stage.scripts.run(stage.scripts.lead({MODEL: Term(0)}, SchedulerId("killed"), lease_ms=1))
    assert isinstance(term, int)
    takeovers: list[list[int]] = []
    completed = False
    while not completed:
        numbers = [len(takeovers) * SEQUENCES + offset for offset in range(1, SEQUENCES + 1)]
        takeovers.append(numbers)
        dead = await stage.join(f"dead-{len(takeovers)}", slots=SEQUENCES)
        await owned_by(stage, dead, numbers)
        await stage.kill(dead)
        mortal = Mortal(stage.redis, stage.keys, len(takeovers))
        mesh = MeshAccess(stage.redis, stage.keys, mortal, stage.membership, Tracing())
        leader = EffectPerformer(mesh, MODEL, term, shards=mesh.keys.shards, tombstone_ms=1_000)
        try:
            while await leader.perform([ReclaimPart(dead)]) != [Reclaimed(dead, is_all=True)]:
                pass
            completed = True
        except Killed:
            assert len(takeovers) < CALLS_MAX
        await mesh.links.close()
    alive = await stage.join("alive", slots=len(takeovers) * SEQUENCES)

    async with stage.scheduler():
        everything = [number for numbers in takeovers for number in numbers]
        records = await stage.live(*everything)

        async def all_steps_are_there() -> bool:
            return len(await stage.inbox(alive)) == 2 * len(everything)

        await stage.until(all_steps_are_there)
        found = await stage.inbox(alive)

    assert len(takeovers) > 8, "each call of a takeover was the last one once"
    assert {alive} == {record["ow"] for record in records}
    for number, record in zip(everything, records, strict=True):
        assert [1, 2] == step_numbers(found, number)
        assert {int(record["ep"])} == {one.epoch for one in found if one.sequence == sequence_id(MODEL, "", number)}


class Sequence3160:
    """One sequence, whose executor is played here too."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self.mesh = mesh
        self.shard = mesh.keys.shard_of(mesh.sequence(7))
        self.commands: Any = mesh.redis

    def submission(self, flags: StepFlag = StepFlag.NONE, *, request_id: str) -> Submission:
        return self.mesh.submission(7, {"INPUT": np.ones((1, 1), np.int32)}, flags, request_id=request_id)

    async def run_one(self) -> int:
        """Commits the only step in the inbox; its number."""
        (step,) = await self.mesh.steps(EXECUTOR)
        saved: dict[str, Any] = {"entries": (step.entry,), "checkpoint": (("h", b"x"),)}
        done = commit_of(step, encode(ReplyMessage("1", step=step.step)), keep_reply=True, **saved)
        assert [CommitCode.COMMITTED] == await self.mesh.committed(EXECUTOR, done, tombstone_ms=1_000)
        return step.step


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("before", [2**31 - 3, 2**32 - 3, 2**46])
async def test_triton_3160_a_sequence_has_as_many_steps_as_it_likes(redis: Redis, key_prefix: str, before: int) -> None:
    """There (triton-inference-server/server#3160) a sequence of millions of requests was told, in the middle, that it
    must specify the START flag. Here steps are numbered beyond what fits 32 bits, and a retry finds its own."""
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 1), "sum")
    await mesh.open()
    sequence = Sequence3160(mesh)
    await mesh.submit(sequence.submission(StepFlag.START, request_id="first"))
    await mesh.assign(7, EXECUTOR)
    assert 1 == await sequence.run_one()
    record: Any = mesh.keys.sequence(mesh.sequence(7)).record
    await sequence.commands.hset(record, mapping={"nx": before, "cm": before, "ck": before})

    numbers = range(before + 1, before + 7)
    for n in numbers:
        step = sequence.submission(request_id=f"step {n}")
        accepted = await mesh.submit(step)
        assert (SubmitCode.DELIVERED, n) == (accepted.code, accepted.step)
        assert n == await sequence.run_one()
        assert n == (await mesh.reply(step)).step
    for n in numbers:
        again = await mesh.submit(sequence.submission(request_id=f"step {n}"))
        assert (SubmitCode.REPEATED, n) == (again.code, again.step)
