"""Metrics of slots and of sequences that wait: every gateway shows the whole mesh."""

from __future__ import annotations

import asyncio

from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.test_statistics import page
from tests.mesh.traffic import GrpcCaller, Step


async def test_every_gateway_shows_how_full_the_mesh_is(mesh: RunningMesh) -> None:
    executors = mesh.names("executor")
    await eventually(lambda: len(mesh.alive()) == len(executors), "every executor serves")
    model, slots = "counted_sum", mesh.slots("counted_sum")

    def shown(metric: str, gateway: int, **labels: str) -> float:
        return page(mesh, gateway)[metric][1].get(tuple(sorted({"model": model, **labels}.items())), 0.0)

    def shown_of_all(metric: str, gateway: int) -> float:
        return sum(shown(metric, gateway, executor=executor) for executor in executors)

    for gateway in range(2):
        await eventually(lambda gateway=gateway: shown_of_all("seqmesh_slots", gateway) == slots, "slots are known")
    names = [f"counted {number}" for number in range(slots + 1)]
    caller = GrpcCaller(mesh.grpc())
    for name in names[:-1]:
        await caller(model, Step(name, 1, start=True))
    waiting = asyncio.create_task(caller(model, Step(names[-1], 1, start=True, end=True)))

    await eventually(lambda: shown("seqmesh_waiting_sequences", 0) == 1, "one waits")
    for gateway in range(2):
        assert (slots, 1) == (shown("seqmesh_live_sequences", gateway), shown("seqmesh_waiting_sequences", gateway))
        assert [slots, slots] == [shown_of_all(metric, gateway) for metric in ("seqmesh_slots", "seqmesh_slots_used")]
        rows, possible, batches = (
            shown(metric, gateway, version="1")
            for metric in ("seqmesh_batch_rows", "seqmesh_batch_rows_possible", "nv_inference_exec_count")
        )
        assert (slots, 2 * batches) == (rows, possible)

    for name in names[:-1]:
        await caller(model, Step(name, 1, end=True))
    await waiting
    await caller.close()
    assert [0, 0, 0] == [
        shown("seqmesh_live_sequences", 1),
        shown("seqmesh_waiting_sequences", 1),
        shown_of_all("seqmesh_slots_used", 1),
    ]
