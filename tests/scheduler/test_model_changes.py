"""The scripts behind a reload and an unload, on the real server: who is ended, who is moved, who is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from shared.ids import ExecutorId
from shared.keyspace import Keyspace
from shared.membership import Membership
from shared.messages import ReplyMessage, StepFlag, encode
from shared.scripts import Rejection
from tests.scripted_mesh import ScriptedMesh

ALICE = ExecutorId("alice")
START = StepFlag.START


def value(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"INPUT": np.array([[number]], np.int64)}


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> AsyncIterator[ScriptedMesh]:
    # One shard: every sequence's epoch comes from the same counter.
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 1), "sum")
    await mesh.open()
    yield mesh
    await Membership(redis, mesh.keys).remove(ALICE)


async def commit_first(mesh: ScriptedMesh, number: int) -> None:
    """What matters here of the commit of a sequence's first step."""
    keys = mesh.keys.sequence(mesh.sequence(number))
    await mesh.redis.hset(keys.record, "cm", 1)
    await mesh.redis.pexpire(keys.idle, 60_000)


async def reclaim_only(mesh: ScriptedMesh, only: dict[str, int | None], count: int = 9) -> list[int]:
    """Calls until nothing is left; how many each call took."""
    (shard,) = mesh.keys.shard_ids()
    taken: list[int] = []
    while not taken or taken[-1]:
        call = mesh.scripts.reclaim(
            ALICE, shard=shard, model="sum", term=mesh.term, count=count, tombstone_ms=1000, only=only
        )
        taken.append(await mesh.scripts.run(call))
    return taken


async def test_a_reload_ends_what_was_assigned_before_its_floor_and_nothing_else(mesh: ScriptedMesh) -> None:
    for number in (1, 2, 3):
        await mesh.submit(mesh.submission(number, value(1), START))
        await mesh.assign(number, ALICE, slot=number)
    floor = int((await mesh.record(2))["ep"])

    assert [1, 1, 0] == await reclaim_only(mesh, {"1": floor, "7": None}, count=1)

    # Their first step is in flight: whoever gets it can begin with it.
    assert ["m", "m", "l"] == [(await mesh.record(number))["st"] for number in (1, 2, 3)]
    assert "vd" not in await mesh.record(1)
    await end_all(mesh, 1, 2, 3)


async def test_a_step_behind_a_lost_start_hears_that_the_state_is_gone(mesh: ScriptedMesh) -> None:
    """Also where the mesh holds the state: it is another model's."""
    await mesh.submit(mesh.submission(1, value(1), START))
    await mesh.assign(1, ALICE)
    await commit_first(mesh, 1)
    await mesh.submit(mesh.submission(2, value(1), START))
    await mesh.assign(2, ALICE, slot=1)
    await commit_first(mesh, 2)
    await mesh.submit(mesh.submission(2, value(1)))

    await reclaim_only(mesh, {"1": 1 << 40})

    assert "o" == (await mesh.record(1))["st"]
    moving = await mesh.record(2)
    assert ("m", "1", "o") == (moving["st"], moving["vd"], moving["vk"])
    await end_all(mesh, 2)


async def test_a_version_that_goes_moves_its_sequences_with_their_state(mesh: ScriptedMesh) -> None:
    await mesh.submit(mesh.submission(1, value(1), START))
    await mesh.assign(1, ALICE)
    await commit_first(mesh, 1)

    assert [0] == await reclaim_only(mesh, {"2": None})
    assert [1, 0] == await reclaim_only(mesh, {"1": None})

    record = await mesh.record(1)
    assert "m" == record["st"]
    assert "vd" not in record
    await end_all(mesh, 1)


async def test_a_moving_sequence_of_an_unloaded_model_is_refused_with_all_its_steps(mesh: ScriptedMesh) -> None:
    first, second = mesh.submission(1, value(1), START), mesh.submission(1, value(2))
    await mesh.submit(first)
    await mesh.assign(1, ALICE)
    await mesh.take_over(ALICE)
    await mesh.submit(second)

    assert [2] == await end_all(mesh, 1)
    assert ["gone", "gone"] == [(await mesh.reply(submission)).error for submission in (first, second)]
    assert {} == await mesh.record(1)


async def end_all(mesh: ScriptedMesh, *numbers: int) -> list[int]:
    """Takes every sequence away and refuses it."""
    await mesh.take_over(ALICE)
    (shard,) = mesh.keys.shard_ids()
    reply = encode(ReplyMessage("1", error_code="UNAVAILABLE", error="gone"))
    waits = [
        Rejection(mesh.sequence(number), record["be"], reply)
        for number in numbers
        if (record := await mesh.record(number)).get("be")
    ]
    return await mesh.scripts.run(mesh.scripts.reject(waits, shard=shard, model="sum", term=mesh.term))
