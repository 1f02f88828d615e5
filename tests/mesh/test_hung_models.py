"""Models that do not come back from a call: their executors end, others go on with everything but what hangs them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio

from shared.contract.limits import LOST_EXECUTORS_MAX, LOST_OWNERS_MAX
from tests.mesh.conftest import MakeMesh, wait_until_equal
from tests.mesh.model_repository import HANGS, add_endless_model, add_hanging_models
from tests.mesh.running_mesh import eventually
from tests.mesh.traffic import Callers, Step, Traffic, make_plans, refused

LIMIT_S = 0.5
SHORT_BATCHES = 400
"""After which the next one runs on the event loop."""
ATTEMPTS = 4


async def add(client: Any, value: int) -> float:
    """One stateless request."""
    tensors = [grpc_aio.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in tensors:
        tensor.set_data_from_numpy(np.full((1, 16), value, np.float32))
    return float((await client.infer("add_sub", tensors)).as_numpy("OUTPUT0")[0, 0])


@pytest.mark.timeout(240)
async def test_what_hangs_its_executors_is_given_up_and_everything_beside_it_goes_on(
    make_mesh: MakeMesh, tmp_path: Any, chance: random.Random
) -> None:
    """Also sequences with a step in flight each time that an executor ended. One of the two can still say what hangs;
    in the other no Python code runs any more."""
    add_hanging_models(tmp_path / "models", "executor-1")
    environment = {"SEQMESH_BATCH_LIMIT_S": str(LIMIT_S)}
    mesh = make_mesh(models=[tmp_path / "models"], executors=2, environment=environment)
    over = asyncio.Event()
    async with (
        Callers(mesh) as callers,
        grpc_aio.InferenceServerClient(mesh.grpc()) as client,
        asyncio.TaskGroup() as group,
    ):
        assert 5 == await callers[0]("running_sum", Step("poisoned", 5, start=True))
        traffic = Traffic("running_sum", callers, make_plans(chance, 6), chance)
        group.create_task(traffic.run_until(over))
        await eventually(lambda: traffic.answered > 10, "its neighbours are played")
        stateless = group.create_task(refused(add(client, HANGS)))

        assert f"given up: {LOST_OWNERS_MAX} executors" in await refused(
            callers[0]("running_sum", Step("poisoned", HANGS))
        )
        assert f"given up: {LOST_EXECUTORS_MAX} executors" in await stateless
        over.set()
        assert 4 == await add(client, 2)
    await eventually(lambda: len(mesh.alive()) == 2, "both executors are back")
    wait_until_equal(0, lambda: mesh.slots_held("running_sum"), "slots held")
    assert "model hangs, giving the lease up" in mesh.log("executor-1")
    assert "model.py:" in mesh.log("executor-1"), "where it hangs"
    assert "Timeout (" in mesh.log("executor-2")


@pytest.mark.timeout(240)
async def test_a_batch_without_an_end_on_the_event_loop_ends_the_process_and_its_step_is_given_up(
    make_mesh: MakeMesh, tmp_path: Any
) -> None:
    """The loop itself stands still, so nobody looks; a timer ends the process."""
    model = add_endless_model(tmp_path / "models")
    mesh = make_mesh(models=[tmp_path / "models"], executors=1, environment={"SEQMESH_BATCH_LIMIT_S": str(LIMIT_S)})
    async with Callers(mesh) as callers:
        # One batch that took long for a moment's reason, and the next ones run on the thread.
        for attempt in range(ATTEMPTS):
            name, before = f"short {attempt}", len(mesh.log("executor-1"))
            assert 0 == await callers[0](model, Step(name, 0, start=True))
            for _ in range(SHORT_BATCHES):
                await callers[0](model, Step(name, 1))

            assert f"given up: {LOST_OWNERS_MAX} executors" in await refused(callers[0](model, Step(name, HANGS)))
            assert 7 == await callers[0](model, Step("after", 7, start=True))
            log = mesh.log("executor-1")[before:]
            if "_watched" in log.partition("Timeout (")[2].partition("model hangs")[0]:
                return
    pytest.fail("no batch ran on the loop")
