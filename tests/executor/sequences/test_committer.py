"""The committer against the real scripts: order over several calls of one shard, and bounds of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from executor.sequences import committer as module
from executor.sequences.committer import Committer
from shared.contract.ids import Epoch, ExecutorId, SequenceId, StepNumber
from shared.contract.messages import StepFlag
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_sender import Call
from shared.store.script_values import NO_JOURNAL, CommitCode, KeptReplies, StepCommit, StepOutcome
from shared.store.scripts import Scripts
from tests.scripted_mesh import ScriptedMesh

EXECUTOR = ExecutorId("a-1")
STEPS = 6


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> AsyncIterator[ScriptedMesh]:
    """Sequence 7 is owned by the executor and has six steps, the last of which ends it."""
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 2), "sum")
    await mesh.open()
    for number in range(1, STEPS + 1):
        flags = StepFlag.START if number == 1 else StepFlag.END if number == STEPS else StepFlag.NONE
        await mesh.submit(mesh.submission(7, {}, flags))
        if number == 1:
            await mesh.assign(7, EXECUTOR)
    yield mesh
    await Membership(redis, mesh.keys).remove(EXECUTOR)


class Owner(SimpleNamespace):
    """Whose steps they are; commits are grouped by who it is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def owner_that_hears(hear: Callable[[Sequence[StepCommit], Sequence[CommitCode], int, int], None]) -> Any:
    return Owner(
        model="sum",
        load=ModelLoad("sum", "1", ""),
        idle_ms=60_000,
        kept_replies=KeptReplies(),
        journal=NO_JOURNAL,
        mark="",
        committed=hear,
    )


async def committed(mesh: ScriptedMesh, scripts: Scripts, *, reply: bytes = b"reply") -> list[tuple[int, CommitCode]]:
    """Commits all steps at once; what the owner heard, in order."""
    heard: list[tuple[int, CommitCode]] = []

    def hear(steps: Sequence[StepCommit], codes: Sequence[CommitCode], sent_ns: int, done_ns: int) -> None:
        heard.extend(zip([step.step for step in steps], codes, strict=True))

    owner = owner_that_hears(hear)
    record = await mesh.redis.hgetall(mesh.keys.sequence(mesh.sequence(7)).record)
    entries = await mesh.redis.xrange(mesh.keys.inbox(mesh.keys.shard_of(mesh.sequence(7)), EXECUTOR))
    steps = [
        step_commit(mesh.sequence(7), Epoch(int(record[b"ep"])), number, entry.decode(), reply)
        for number, (entry, _) in enumerate(entries, 1)
    ]
    made = Committer(scripts, mesh.redis, mesh.keys, EXECUTOR, 60_000)
    running = asyncio.create_task(made.run(time.time_ns))
    made.put(owner, steps)
    async with asyncio.timeout(60):
        done, _ = await asyncio.wait(
            {running, asyncio.create_task(made.drained())}, return_when=asyncio.FIRST_COMPLETED
        )
    assert running not in done, running.exception()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return heard


def step_commit(sequence: SequenceId, epoch: Epoch, number: int, entry: str, reply: bytes) -> StepCommit:
    flags = StepFlag.START if number == 1 else StepFlag.END if number == STEPS else StepFlag.NONE
    return StepCommit(sequence, epoch, StepNumber(number), flags, StepOutcome.DONE, "", "", reply, entries=(entry,))


class FailsOnce(Scripts):
    """The first call of the first round trip with several is not carried out, those behind it are."""

    sizes: list[int]

    async def run_all(self, calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
        failing = not hasattr(self, "sizes")
        self.sizes = [*getattr(self, "sizes", []), len(calls)]
        outcomes = await super().run_all(calls[1:] if failing else calls, link)
        return [ResponseError("not this time"), *outcomes] if failing else outcomes


async def test_a_call_that_fails_does_not_make_those_behind_it_in_its_shard_fatal(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCRIPT_STEPS_MAX", 2)
    scripts = FailsOnce(mesh.redis, mesh.keys)

    heard = await committed(mesh, scripts)

    assert [*((number, CommitCode.COMMITTED) for number in range(1, STEPS)), (STEPS, CommitCode.OVER)] == heard
    assert 3 == scripts.sizes[0]


async def test_a_call_carries_no_more_than_a_bounded_number_of_bytes(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCRIPT_BYTES_MAX", 100)
    scripts = FailsOnce(mesh.redis, mesh.keys)

    heard = await committed(mesh, scripts, reply=bytes(60))

    assert STEPS == len(heard)
    assert 3 == scripts.sizes[0]


def test_a_steps_checkpoint_counts_with_its_answer() -> None:
    step = msgspec.structs.replace(
        step_commit(SequenceId("m||i7"), Epoch(1), 1, "0-1", bytes(3)), checkpoint=(("s:h", bytes(40)), ("s:c", b"c"))
    )

    assert 44 == module.size_of(step)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(("bound", "most"), [("OPEN_BYTES_MAX", 100), ("OPEN_STEPS_MAX", 2)])
async def test_computing_waits_while_what_waits_for_redis_has_too_many_bytes(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    def hear(*_: object) -> None: ...

    monkeypatch.setattr(module, bound, most)
    owner = owner_that_hears(hear)
    record = await mesh.redis.hgetall(mesh.keys.sequence(mesh.sequence(7)).record)
    epoch = Epoch(int(record[b"ep"]))
    made = Committer(Scripts(mesh.redis, mesh.keys), mesh.redis, mesh.keys, EXECUTOR, 60_000)

    made.put(owner, [step_commit(mesh.sequence(7), epoch, 1, "0-1", bytes(99))])
    await made.below_bounds.wait()
    made.put(owner, [step_commit(mesh.sequence(7), epoch, 2, "0-2", bytes(1))])
    waiting = asyncio.create_task(made.below_bounds.wait())
    await asyncio.sleep(0)
    assert not waiting.done()

    running = asyncio.create_task(made.run(time.time_ns))
    async with asyncio.timeout(60):
        await waiting
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
