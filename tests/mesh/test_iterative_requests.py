"""A request that its model wants many times over is one step of the mesh: it outlives the executor that runs it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc_aio

from tests.mesh.running_mesh import RunningMesh, eventually, wait

MODEL = "iterative"
REQUESTS = 6
PASSES = 120


def owners(mesh: RunningMesh) -> set[str]:
    """The names of the executors that hold requests of the model."""
    return {
        registration.name
        for registration in mesh.alive()
        for shard in mesh.keys.shards
        if mesh.redis.scard(mesh.keys.owned(shard, registration.executor, MODEL))
    }


async def test_its_passes_begin_anew_where_it_is_taken_over(victim: RunningMesh) -> None:
    client: Any = grpc_aio.InferenceServerClient(victim.grpc())
    tensor = grpc_aio.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[PASSES]], np.int32))
    try:
        requests = [asyncio.create_task(client.infer(MODEL, [tensor])) for _ in range(REQUESTS)]
        held = await eventually(lambda: owners(victim), "they are held")
        victim.kill(min(held))
        answers = await asyncio.gather(*requests)
    finally:
        await client.close()

    assert [PASSES] * REQUESTS == [answer.as_numpy("OUTPUT").item() for answer in answers]
    for answer in answers:
        seen = json.loads(answer.as_numpy("SEEN").item())
        assert [1] + [0] * (PASSES - 1) == [one["flags"] for one in seen]
        assert 1 == len({one["id"] for one in seen})
    wait(lambda: not victim.slots_held(MODEL), "every slot is free again")
