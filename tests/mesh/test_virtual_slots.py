"""Many more live sequences than slots, on real processes: everybody gets a turn, and every sum is right."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.contract.ids import sequence_id
from shared.store.waiting_line import WaitingLine
from tests.mesh.running_mesh import RunningMesh, eventually, seqmesh
from tests.mesh.traffic import Callers, GrpcCaller, Step, Traffic, make_plans

SEQUENCES = 100


def line(mesh: RunningMesh, model: str) -> WaitingLine:
    """What the model's waiting line amounts to."""
    line = WaitingLine()
    for shard in mesh.keys.shards:
        for name, number in mesh.redis.hgetall(mesh.keys.line(shard, model)).items():
            line.add(name.decode(), int(number))
    return line


@pytest.mark.parametrize("model", ["paged_sum", "rarely_saved_sum"])
async def test_sums_are_right_though_everybody_shares_a_few_slots_and_an_executor_is_killed(
    victim: RunningMesh, chance: random.Random, model: str
) -> None:
    """rarely_saved_sum: a checkpoint every third step; the steps since then follow the sequence to its next slot."""
    before = line(victim, model)
    plans = make_plans(chance, SEQUENCES, shortest=3, longest=5)
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(model, callers, plans, chance)
        group.create_task(traffic.run())
        await traffic.progress(0.4)
        victim.kill(chance.choice(victim.names("executor")))

    assert 0 == traffic.repeated
    after = line(victim, model)
    assert after.paged_out["1"] > before.paged_out["1"]
    assert (0, 0) == (after.steps["1"], after.paged["1"])


async def test_an_idle_sequence_makes_room_and_comes_back_to_its_state(victim: RunningMesh) -> None:
    caller = GrpcCaller(victim.grpc())
    names = [f"idle {number}" for number in range(2 * victim.slots("paged_sum"))]
    for number, name in enumerate(names):
        assert number == await caller("paged_sum", Step(name, number, start=True))
    assert victim.slots("paged_sum") >= victim.slots_held("paged_sum")
    await eventually(lambda: paged(victim, names), "some are paged")

    for number, name in enumerate(names):
        assert number + 1 == await caller("paged_sum", Step(name, 1))
    # One that is paged can end like any other. The first ones are, unless they changed their executor meanwhile.
    kept = (await eventually(lambda: paged(victim, names), "some are paged"))[0]
    for number, name in enumerate(names):
        if name != kept:
            assert number + 2 == await caller("paged_sum", Step(name, 1, end=True))
    # An operator hears where it is, and can have it wherever there is a slot.
    assert "it gets a slot with its next step" in await seqmesh(victim, "seq", "move", "paged_sum", kept)
    placed = await seqmesh(victim, "seq", "move", "paged_sum", kept, "--to", "executor-2")
    assert "the sequence held no slot; it has one on executor-2-" in placed
    assert "l" == victim.record(sequence_id("paged_sum", "", kept))["st"]
    assert names.index(kept) + 2 == await caller("paged_sum", Step(kept, 1, end=True))
    await caller.close()


def paged(mesh: RunningMesh, names: list[str]) -> list[str]:
    """Those of the sequences that have no slot."""
    return [name for name in names if mesh.record(sequence_id("paged_sum", "", name)).get("st") == "p"]


async def test_more_sequences_than_rows_drive_nobody_out(victim: RunningMesh, chance: random.Random) -> None:
    """A slot is a place for a state and no row of the batch: six of each executor, in batches of three.

    Where a busy machine costs an executor its lease, its sequences do drive others out: such a round says nothing.
    """
    executors, before = set[str](), 0
    async with Callers(victim) as callers:
        while not executors or executors != {one.executor for one in victim.alive()}:
            await eventually(lambda: victim.slots("paged_sum") == 2 * 6, "both executors serve")
            executors = {one.executor for one in victim.alive()}
            before = line(victim, "paged_sum").paged_out["1"]
            plans = make_plans(chance, 2 * 6 - 2, shortest=3, longest=4)
            await Traffic("paged_sum", callers, plans, chance).run()

    assert before == line(victim, "paged_sum").paged_out["1"]
