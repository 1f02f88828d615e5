"""`pause` and `resume`, and what the other scripts do with a paused sequence: on the real server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shared.contract.ids import ExecutorId, InstanceIndex, SlotIndex
from shared.contract.messages import InboxOwned, InboxStep, InboxVacated, ReplyMessage, StepFlag, encode
from shared.contract.record import CANCELLED
from shared.store.script_values import (
    Assignment,
    CancelCode,
    CommitCode,
    EndCode,
    Ending,
    LedShard,
    Orphan,
    SubmitCode,
    VacateCode,
)
from tests.scripted_mesh import GATEWAY, ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
IDLE_MS, PAUSE_MS = 60_000, 3_600_000
PAGEABLE, START = StepFlag.PAGEABLE, StepFlag.START
pytestmark = pytest.mark.leaves_sequences


@pytest.fixture
def shards() -> int:
    return 3


async def commit(mesh: ScriptedMesh, step: InboxStep, executor: ExecutorId, *, checkpoint: bool = True) -> CommitCode:
    saved: dict[str, Any] = {"entries": [step.entry], "checkpoint": [("s:h", b"state %d" % step.step)]}
    done = commit_of(step, encode(ReplyMessage("1", step=step.step)), **(saved if checkpoint else {}))
    (code,) = await mesh.committed(executor, done, idle_ms=IDLE_MS)
    return code


async def live(mesh: ScriptedMesh, flags: StepFlag = PAGEABLE) -> InboxStep:
    """Sequence 7 on ALICE, with one committed step."""
    await mesh.submit(mesh.submission(7, ONE, START | flags))
    await mesh.assign(7, ALICE)
    (step,) = await mesh.steps(ALICE)
    assert CommitCode.COMMITTED is await commit(mesh, step, ALICE)
    return step


async def deadline_ms(mesh: ScriptedMesh) -> float | None:
    sequence = mesh.sequence(7)
    return await mesh.redis.zscore(mesh.keys.deadlines(mesh.keys.shard_of(sequence), "sum"), sequence)


async def idle_ms(mesh: ScriptedMesh) -> int:
    return await mesh.redis.pttl(mesh.keys.sequence(mesh.sequence(7)).idle)


async def waiting_kinds(mesh: ScriptedMesh) -> list[bytes]:
    stream = mesh.keys.starts(mesh.keys.shard_of(mesh.sequence(7)), "sum")
    return [fields[b"k"] for _, fields in await mesh.redis.xrange(stream)]


async def feed(mesh: ScriptedMesh) -> list[tuple[bytes, bytes]]:
    stream = mesh.keys.feed(mesh.keys.shard_of(mesh.sequence(7)), "sum")
    return [(fields[b"k"], fields.get(b"b", b"")) for _, fields in await mesh.redis.xrange(stream)]


async def test_its_slot_is_free_and_its_idle_time_stands_still(mesh: ScriptedMesh) -> None:
    step = await live(mesh)

    assert await mesh.pause(7, pause_ms=PAUSE_MS)

    assert [InboxVacated] == [type(one) for one in await mesh.inbox(ALICE)]
    assert [(b"p", b"")] == await feed(mesh)
    assert PAUSE_MS < await idle_ms(mesh) <= PAUSE_MS + IDLE_MS
    assert [] == await waiting_kinds(mesh)
    assert not await mesh.expire(7)
    assert CommitCode.REFUSED is await commit(mesh, step, ALICE)
    assert await mesh.resume(7)
    assert ("p", None) == ((await mesh.record(7))["st"], (await mesh.record(7)).get("ps"))
    assert 0 < await idle_ms(mesh) <= IDLE_MS
    assert not await mesh.resume(7), "it is not paused"
    assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
    assert [b"r"] == await waiting_kinds(mesh)


async def test_the_leader_is_told_when_the_idle_time_of_a_resumed_one_ends(mesh: ScriptedMesh) -> None:
    """It would look at the end of the pause else, as it was told when the sequence was paused."""
    await live(mesh)
    assert await mesh.pause(7, pause_ms=60 * IDLE_MS)
    read = len(await feed(mesh))

    assert await mesh.resume(7)

    assert [b"d"] == [kind for kind, _ in (await feed(mesh))[read:]]
    ((_, fields),) = await mesh.redis.xrevrange(mesh.keys.feed(mesh.keys.shard_of(mesh.sequence(7)), "sum"), count=1)
    assert await deadline_ms(mesh) == pytest.approx(int(fields[b"d"]), abs=1)


async def test_what_runs_and_what_comes_is_run_after_it_in_order(mesh: ScriptedMesh) -> None:
    """2 is committed without a checkpoint, 3 runs, 4 waits at the owner, 5 comes later: the next owner gets all."""
    await live(mesh)
    for _ in range(3):
        assert SubmitCode.DELIVERED is (await mesh.submit(mesh.submission(7, ONE))).code
    second, third, _ = await mesh.steps(ALICE)
    assert CommitCode.COMMITTED is await commit(mesh, second, ALICE, checkpoint=False)

    assert await mesh.pause(7)

    assert CommitCode.REFUSED is await commit(mesh, third, ALICE)
    assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
    assert [] == await waiting_kinds(mesh)
    assert await mesh.pause(7), "paused again"
    assert await mesh.resume(7)
    assert [b"m"] == await waiting_kinds(mesh)
    epoch = await mesh.assign(7, BOB)
    assert [(2, epoch), (3, epoch), (4, epoch), (5, epoch)] == sorted((s.step, s.epoch) for s in await mesh.steps(BOB))
    assert [] == await mesh.steps(ALICE)
    line = await mesh.redis.hgetall(mesh.keys.line(mesh.keys.shard_of(second.sequence), "sum"))
    assert 0 == int(line[b"s:1"]), "no step waits any more"


async def test_one_that_is_to_keep_its_slot_waits_for_one_at_once(mesh: ScriptedMesh) -> None:
    await live(mesh, StepFlag.NONE)
    assert await mesh.pause(7)

    assert await mesh.resume(7)

    epoch = await mesh.assign(7, BOB)
    assert [epoch] == [one.epoch for one in await mesh.inbox(BOB) if isinstance(one, InboxOwned)]


async def test_a_paged_one_and_one_that_moves_are_paused_where_they_are(mesh: ScriptedMesh) -> None:
    await live(mesh)
    assert VacateCode.VACATED is await mesh.vacate(7)
    assert await mesh.pause(7)
    assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
    assert [] == await waiting_kinds(mesh)
    assert await mesh.resume(7)

    waits = (await mesh.record(7))["be"]
    assert await mesh.pause(7)

    assert [] == await waiting_kinds(mesh)
    assert (b"h", waits.encode()) == (await feed(mesh))[-1]
    late = Assignment(mesh.sequence(7), waits, BOB, InstanceIndex(0), SlotIndex(0))
    shard = mesh.keys.shard_of(mesh.sequence(7))
    assert [0] == await mesh.scripts.run(mesh.scripts.assign([late], LedShard(shard, "sum", mesh.term)))
    assert await mesh.resume(7)
    assert 0 < await mesh.assign(7, BOB)
    assert [2] == [one.step for one in await mesh.steps(BOB)]


async def test_it_is_resumed_when_its_pause_is_over(mesh: ScriptedMesh) -> None:
    await live(mesh)
    assert await mesh.pause(7, pause_ms=-1)
    assert not await mesh.expire(7)
    assert "p" == (await mesh.record(7))["st"]
    assert (await deadline_ms(mesh) or 0) > 0
    await mesh.assign(7, BOB)

    assert await mesh.pause(7, pause_ms=-1)
    await mesh.submit(mesh.submission(7, ONE))
    assert not await mesh.expire(7)
    assert None is await deadline_ms(mesh), "it is set by the next commit"
    assert [b"m"] == await waiting_kinds(mesh)


async def test_a_pause_cannot_keep_one_that_is_over_or_about_to_end(mesh: ScriptedMesh) -> None:
    assert not await mesh.pause(7), "there is none"
    await mesh.submit(mesh.submission(7, ONE, START))
    assert not await mesh.pause(7), "it waits for its first slot"
    await mesh.assign(7, ALICE)
    (step,) = await mesh.steps(ALICE)
    await commit(mesh, step, ALICE)
    call = mesh.scripts.end([Ending(mesh.sequence(7))], tombstone=CANCELLED, reply=b"")
    await mesh.scripts.run(call)
    assert not await mesh.pause(7), "it was ended"
    await asyncio.sleep(0.01)
    assert await mesh.expire(7)
    assert not await mesh.pause(7), "it is over"
    assert not await mesh.resume(7)
    assert "c" == (await mesh.record(7))["st"]


async def test_a_pause_that_is_over_before_it_begins_takes_nothing_of_the_idle_time(mesh: ScriptedMesh) -> None:
    """The leader was away, and hears of the wish late."""
    await live(mesh)
    left_ms = await idle_ms(mesh)

    assert await mesh.pause(7, pause_ms=-IDLE_MS)
    assert left_ms - IDLE_MS // 2 < await idle_ms(mesh) <= left_ms
    assert not await mesh.expire(7)
    assert ("p", None) == ((await mesh.record(7))["st"], (await mesh.record(7)).get("ps"))
    assert SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code


async def test_one_whose_idle_time_is_over_stays_over(mesh: ScriptedMesh) -> None:
    await live(mesh)
    await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)

    assert not await mesh.pause(7)
    assert await mesh.expire(7)


async def test_one_whose_idle_time_is_over_behind_its_pause_is_not_paused_again(mesh: ScriptedMesh) -> None:
    """The leader is late: it has ended neither the pause nor the sequence."""
    await live(mesh)
    assert await mesh.pause(7)
    await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)

    assert not await mesh.pause(7)
    assert SubmitCode.EXPIRED is (await mesh.submit(mesh.submission(7, ONE))).code


async def test_one_whose_idle_time_is_over_behind_its_pause_ends_when_it_is_looked_at(mesh: ScriptedMesh) -> None:
    """It kept its record, and if it was to keep a slot got one, for all of the idle time once more."""
    await live(mesh)
    assert await mesh.pause(7, pause_ms=-1)
    await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)

    assert not await mesh.expire(7)
    deadline, (seconds, _) = await deadline_ms(mesh), await mesh.redis.time()
    assert deadline is not None
    assert deadline < (seconds + 1) * 1000, "the next look"
    assert await mesh.expire(7)


async def test_a_state_that_only_its_owner_holds_is_not_taken_from_it(mesh: ScriptedMesh) -> None:
    step = await live(mesh)
    await mesh.redis.hset(mesh.keys.sequence(step.sequence).record, "du", "0")

    assert not await mesh.pause(7)
    assert "l" == (await mesh.record(7))["st"]


async def test_the_end_of_a_paused_one_runs_what_was_accepted(mesh: ScriptedMesh) -> None:
    await live(mesh)
    await mesh.pause(7)
    await mesh.submit(mesh.submission(7, ONE))
    call = mesh.scripts.end([Ending(mesh.sequence(7))], tombstone=CANCELLED, reply=b"")

    assert [EndCode.CLOSED] == await mesh.scripts.run(call)

    assert [b"m"] == await waiting_kinds(mesh)
    await mesh.assign(7, BOB)
    (step,) = await mesh.steps(BOB)
    assert CommitCode.COMMITTED is await commit(mesh, step, BOB)
    await asyncio.sleep(0.01)
    assert await mesh.expire(7)
    assert "c" == (await mesh.record(7))["st"]


async def test_a_step_that_is_cancelled_meanwhile_is_not_run(mesh: ScriptedMesh) -> None:
    await live(mesh)
    await mesh.pause(7)
    submission = mesh.submission(7, ONE)
    accepted = await mesh.submit(submission)

    assert CancelCode.TOLD is await mesh.cancel(submission, accepted)

    await mesh.resume(7)
    await mesh.assign(7, BOB)
    (step,) = await mesh.steps(BOB)
    assert step.cancelled


async def test_a_closed_connection_takes_nothing_of_its_idle_time(mesh: ScriptedMesh) -> None:
    await live(mesh)
    await mesh.pause(7, pause_ms=PAUSE_MS)
    token = (await mesh.record(7))["la"].split()[-1]

    call = mesh.scripts.orphan([Orphan(mesh.sequence(7), token, 10)], gateway=GATEWAY)

    assert [False] == await mesh.scripts.run(call)
    assert PAUSE_MS < await idle_ms(mesh)


async def test_what_waits_in_a_pause_has_the_bound_of_open_steps(mesh: ScriptedMesh) -> None:
    await live(mesh)
    await mesh.pause(7)
    codes = [(await mesh.submit(mesh.submission(7, ONE), in_flight_max=3)).code for _ in range(4)]

    assert [SubmitCode.WAITING] * 3 + [SubmitCode.BUSY] == codes


async def test_a_sweep_keeps_the_pause_and_a_dead_executor_takes_nothing_of_it(mesh: ScriptedMesh) -> None:
    step = await live(mesh)
    await mesh.submit(mesh.submission(7, ONE))
    await mesh.pause(7, pause_ms=PAUSE_MS)
    shard = mesh.keys.shard_of(step.sequence)
    await mesh.redis.delete(mesh.keys.deadlines(shard, "sum"))
    await mesh.take_over(ALICE)

    assert [1] == await mesh.scripts.run(mesh.scripts.sweep([step.sequence], LedShard(shard, "sum", mesh.term)))

    assert [] == await waiting_kinds(mesh)
    assert None is not await deadline_ms(mesh)
    await mesh.resume(7)
    await mesh.assign(7, BOB)
    assert [2] == [one.step for one in await mesh.steps(BOB)]


async def test_a_sweep_keeps_the_pause_of_one_without_an_open_step(mesh: ScriptedMesh) -> None:
    step = await live(mesh)
    await mesh.pause(7)
    before = await mesh.record(7)

    shard = mesh.keys.shard_of(step.sequence)
    assert [1] == await mesh.scripts.run(mesh.scripts.sweep([step.sequence], LedShard(shard, "sum", mesh.term)))

    assert before == await mesh.record(7)


@pytest.mark.parametrize("spoilt", ["", "soon", "12", "1 2 3", "-5 -5"])
async def test_a_pause_whose_times_cannot_be_read_is_over(mesh: ScriptedMesh, spoilt: str) -> None:
    step = await live(mesh)
    record = mesh.keys.sequence(step.sequence).record
    await mesh.redis.hset(record, "ps", spoilt)
    assert not await mesh.resume(7), "it has a slot"
    assert await mesh.pause(7)
    await mesh.redis.hset(record, "ps", spoilt)

    assert not await mesh.expire(7)

    assert not await mesh.resume(7)
    assert 0 < await mesh.assign(7, BOB) or SubmitCode.WAITING is (await mesh.submit(mesh.submission(7, ONE))).code
