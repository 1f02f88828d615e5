"""Metrics of slots and of sequences that wait: every gateway shows the whole mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.test_statistics import page
from tests.mesh.traffic import GrpcCaller, Step

MODEL = "counted_sum"


class Shown:
    """What a gateway shows of the model, read once: a page takes long on a busy machine."""

    def __init__(self, mesh: RunningMesh, gateway: int) -> None:
        self._page = page(mesh, gateway)

    def of_executors(self, metric: str) -> float:
        """The sum over the executors."""
        return sum(
            value
            for labels, value in self._page[metric][1].items()
            if ("model", MODEL) in labels and "executor" in dict(labels)
        )

    def __call__(self, metric: str, **labels: str) -> float:
        return self._page[metric][1].get(tuple(sorted({"model": MODEL, **labels}.items())), 0.0)


def gateways(mesh: RunningMesh) -> Iterator[Shown]:
    """What each of both shows now."""
    return (Shown(mesh, gateway) for gateway in range(2))


async def test_every_gateway_shows_how_full_the_mesh_is(mesh: RunningMesh) -> None:
    await eventually(lambda: len(mesh.alive()) == len(mesh.names("executor")), "every executor serves")
    slots = mesh.slots(MODEL)
    await eventually(
        lambda: all(shown.of_executors("seqmesh_slots") == slots for shown in gateways(mesh)), "slots are known"
    )
    names = [f"counted {number}" for number in range(slots + 1)]
    caller = GrpcCaller(mesh.grpc())
    for name in names[:-1]:
        await caller(MODEL, Step(name, 1, start=True))
    waiting = asyncio.create_task(caller(MODEL, Step(names[-1], 1, start=True, end=True)))

    await eventually(lambda: Shown(mesh, 0)("seqmesh_waiting_sequences") == 1, "one waits")
    for shown in gateways(mesh):
        assert (slots, 1) == (shown("seqmesh_live_sequences"), shown("seqmesh_waiting_sequences"))
        assert [slots, slots] == [shown.of_executors(metric) for metric in ("seqmesh_slots", "seqmesh_slots_used")]
        rows, possible, batches = (
            shown(metric, version="1")
            for metric in ("seqmesh_batch_rows", "seqmesh_batch_rows_possible", "nv_inference_exec_count")
        )
        assert (slots, 2 * batches) == (rows, possible)

    for name in names[:-1]:
        await caller(MODEL, Step(name, 1, end=True))
    await waiting
    await caller.close()
    last = Shown(mesh, 1)
    assert [0, 0, 0] == [
        last("seqmesh_live_sequences"),
        last("seqmesh_waiting_sequences"),
        last.of_executors("seqmesh_slots_used"),
    ]
