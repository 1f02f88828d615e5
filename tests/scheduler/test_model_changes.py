"""The scripts behind a reload and an unload, on the real server: who is ended, who is moved, who is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shared.contract.ids import ExecutorId
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.script_values import CommitCode, LedShard, Rejection, StepOutcome, SubmitCode
from tests.scripted_mesh import ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice"), ExecutorId("bob")
START = StepFlag.START


def value(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"INPUT": np.array([[number]], np.int64)}


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> AsyncIterator[ScriptedMesh]:
    # One shard: every sequence's epoch comes from the same counter.
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 1), "sum")
    await mesh.open()
    yield mesh
    for executor in (ALICE, BOB):
        await Membership(redis, mesh.keys).remove(executor)


async def commit_first(mesh: ScriptedMesh, number: int) -> None:
    """What matters here of the commit of a sequence's first step."""
    keys = mesh.keys.sequence(mesh.sequence(number))
    await mesh.redis.hset(keys.record, "cm", 1)
    await mesh.redis.pexpire(keys.idle, 60_000)


async def reclaim_only(mesh: ScriptedMesh, *only: str, count: int = 9) -> list[int]:
    """Calls until all of Alice's sequences have been looked at; how many each call took."""
    (shard,) = mesh.keys.shards
    taken: list[int] = []
    goes_on = 0
    while not taken or goes_on:
        call = mesh.scripts.reclaim(
            ALICE,
            LedShard(shard, "sum", mesh.term),
            count=count,
            tombstone_ms=1000,
            after=str(goes_on or ""),
            only=only,
        )
        count_taken, goes_on = await mesh.scripts.run(call)
        taken.append(count_taken)
    return taken


async def reload(mesh: ScriptedMesh, *numbers: int, mark: str = "new", version: str = "1") -> list[bool]:
    """Alice has loaded the model anew; which of the sequences are over."""
    (shard,) = mesh.keys.shards
    call = mesh.scripts.reload(
        [mesh.sequence(number) for number in numbers],
        shard=shard,
        executor=ALICE,
        model="sum",
        version=version,
        mark=mark,
        tombstone_ms=60_000,
    )
    return await mesh.scripts.run(call)


@pytest.mark.leaves_sequences
async def test_a_reload_ends_what_is_idle_since_before_it_and_frees_its_slot(mesh: ScriptedMesh) -> None:
    for number, mark in ((1, "old"), (2, "old"), (3, "new"), (4, "")):
        await start(mesh, number, mark)
    await mesh.submit(mesh.submission(2, value(1)))
    await mesh.submit(mesh.submission(5, value(1), START))
    await mesh.assign(5, ALICE, slot=5)
    (shard,) = mesh.keys.shards
    epoch = (await mesh.record(1))["ep"]

    assert [False] * 5 == await reload(mesh, 1, 2, 3, 4, 5, version="2")
    # 2 has a step in flight, 3 began since, of 4 nobody said anything, and 5 has not begun.
    assert [True, False, False, False, False] == await reload(mesh, 1, 2, 3, 4, 5)
    assert [False] == await reload(mesh, 1)

    record = await mesh.record(1)
    assert ("o", "1") == (record["st"], record["cl"])
    assert SubmitCode.LOST is (await mesh.submit(mesh.submission(1, value(1)))).code
    feed = await mesh.redis.xrange(mesh.keys.feed(shard, "sum"))
    assert [{b"q": b"sum||i1", b"e": epoch.encode(), b"k": b"o", b"s": b"0"}] == [fields for _, fields in feed]
    assert not await mesh.redis.sismember(mesh.keys.owned(shard, ALICE, "sum"), mesh.sequence(1))
    await end_all(mesh, 2, 3, 4, 5)


@pytest.mark.leaves_sequences
async def test_a_sequence_that_is_anothers_now_is_left_alone(mesh: ScriptedMesh) -> None:
    await start(mesh, 1, "old")
    await mesh.vacate(1, moving=True)
    assert [False] == await reload(mesh, 1)
    await mesh.assign(1, BOB)

    assert [False] == await reload(mesh, 1)
    await mesh.take_over(BOB)
    await end_all(mesh, 1)


@pytest.mark.leaves_sequences
async def test_the_mark_is_that_of_the_latest_start(mesh: ScriptedMesh) -> None:
    await start(mesh, 1, "old")
    assert "old" == (await mesh.record(1))["mk"]
    await mesh.submit(mesh.submission(1, value(1)))
    await commit(mesh, 1, "new")
    assert "old" == (await mesh.record(1))["mk"], "a step goes on from the state of its START"

    await mesh.submit(mesh.submission(1, value(1), START))
    await commit(mesh, 1, "new", outcome=StepOutcome.FAILED)
    assert "mk" not in await mesh.record(1), "there is no state any more"
    await start(mesh, 1, "new")
    await mesh.submit(mesh.submission(1, value(1), START))
    await commit(mesh, 1, "newest")
    assert "newest" == (await mesh.record(1))["mk"]
    await end_all(mesh, 1)


async def start(mesh: ScriptedMesh, number: int, mark: str) -> None:
    """A sequence of Alice's with one committed step, which a load of that mark has run."""
    await mesh.submit(mesh.submission(number, value(1), START))
    await mesh.assign(number, ALICE, slot=number)
    await commit(mesh, number, mark)


async def commit(mesh: ScriptedMesh, number: int, mark: str, *, outcome: StepOutcome = StepOutcome.DONE) -> None:
    """The latest step of a sequence of Alice's."""
    (*_, step) = await mesh.steps(ALICE)
    final = commit_of(step, outcome=outcome, entries=[step.entry])
    (code,) = await mesh.committed(ALICE, final, tombstone_ms=60_000, mark=mark)
    assert code in (CommitCode.COMMITTED, CommitCode.OVER)


async def test_a_version_that_goes_moves_its_sequences_with_their_state(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission(1, value(1), START))
    await mesh.assign(1, ALICE)
    await commit_first(mesh, 1)

    assert [0] == await reclaim_only(mesh, "2")
    assert 1 == sum(await reclaim_only(mesh, "1", "7", count=1))

    record = await mesh.record(1)
    assert "m" == record["st"]
    assert "vd" not in record
    await end_all(mesh, 1)


@pytest.mark.parametrize(("begun", "heard"), [(False, SubmitCode.NEVER_SEEN), (True, SubmitCode.LOST)])
async def test_a_moving_sequence_of_an_unloaded_model_is_refused_with_all_its_steps(
    mesh: ScriptedMesh, *, begun: bool, heard: SubmitCode
) -> None:
    """It is lost, if its START was committed."""
    if begun:
        await mesh.submit(mesh.submission(1, value(1), START))
        await mesh.assign(1, ALICE)
        await commit(mesh, 1, "mark")
    first, second = mesh.submission(1, value(1), StepFlag.NONE if begun else START), mesh.submission(1, value(2))
    await mesh.submit(first)
    if not begun:
        await mesh.assign(1, ALICE)
    await mesh.take_over(ALICE)
    await mesh.submit(second)

    assert [2] == await end_all(mesh, 1)
    assert ["gone", "gone"] == [(await mesh.reply(submission)).error for submission in (first, second)]
    assert heard is (await mesh.submit(mesh.submission(1, value(3)))).code


async def end_all(mesh: ScriptedMesh, *numbers: int) -> list[int]:
    """Takes every sequence away and refuses it."""
    await mesh.take_over(ALICE)
    (shard,) = mesh.keys.shards
    reply = encode(ReplyMessage("1", error_code="UNAVAILABLE", error="gone"))
    waits = [
        Rejection(mesh.sequence(number), record["be"], reply)
        for number in numbers
        if (record := await mesh.record(number)).get("be")
    ]
    return await mesh.scripts.run(mesh.scripts.reject(waits, LedShard(shard, "sum", mesh.term), tombstone_ms=60_000))
