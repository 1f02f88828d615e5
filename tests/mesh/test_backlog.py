"""More sequences than slots: everybody gets one, the oldest first."""

from __future__ import annotations

import asyncio
import random

from shared.contract.ids import sequence_id
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import Callers, GrpcCaller, Step, Traffic, make_plans


async def test_many_more_sequences_than_slots_all_finish_with_the_right_sums(
    mesh: RunningMesh, chance: random.Random
) -> None:
    plans = make_plans(chance, 10 * mesh.slots("narrow_sum"), longest=5)
    async with Callers(mesh) as callers:
        await Traffic("narrow_sum", callers, plans, chance, pause_s=0.005).run()

    await eventually(lambda: mesh.slots_held("narrow_sum") == 0, "every slot is free again")


async def test_a_free_slot_goes_to_the_sequence_that_has_waited_longest(mesh: RunningMesh) -> None:
    caller = GrpcCaller(mesh.grpc())
    holders = [f"holder {number}" for number in range(mesh.slots("narrow_sum"))]
    for name in holders:
        await caller("narrow_sum", Step(name, 1, start=True))
    served: list[str] = []

    async def wait_in_line(name: str) -> None:
        await caller("narrow_sum", Step(name, 1, start=True))
        served.append(name)

    line = [f"waiting {number}" for number in range(2 * len(holders))]
    async with asyncio.TaskGroup() as group:
        for name in line:
            group.create_task(wait_in_line(name))
            sequence = sequence_id("narrow_sum", "", name)
            await eventually(lambda sequence=sequence: mesh.record(sequence).get("st") == "w", f"'{name}' waits")
        for number, name in enumerate([*holders, *line[: len(holders)]]):
            assert number == len(served)
            await caller("narrow_sum", Step(name, 1, end=True))
            await eventually(lambda number=number: len(served) > number, "the next one gets the slot")

    assert line == served
    for name in line[len(holders) :]:
        await caller("narrow_sum", Step(name, 1, end=True))
    await caller.close()


async def test_steps_sent_while_their_sequence_waits_run_in_order_once_it_has_a_slot(mesh: RunningMesh) -> None:
    caller = GrpcCaller(mesh.grpc())
    holders = [f"in the way {number}" for number in range(mesh.slots("narrow_sum"))]
    for name in holders:
        await caller("narrow_sum", Step(name, 1, start=True))

    async with asyncio.TaskGroup() as group:
        steps: list[asyncio.Task[int]] = []
        sequence = sequence_id("narrow_sum", "", 77)
        for number in range(1, 6):
            step = Step(77, number, start=number == 1, end=number == 5)
            steps.append(group.create_task(caller("narrow_sum", step)))
            await eventually(lambda number=number: mesh.record(sequence).get("nx") == str(number), "step is accepted")
        for name in holders:
            await caller("narrow_sum", Step(name, 1, end=True))

    assert [1, 3, 6, 10, 15] == [step.result() for step in steps]
    await caller.close()
