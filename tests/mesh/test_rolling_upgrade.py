"""A mesh is brought to a later release and back, service by service under load: no error and no wrong sum.

The later release is a stand-in (`tests/fixtures/formats/later`): this code, but with one more field in every message.
So each service reads, beside its own, a format that has more than it knows, and one that lacks what it knows. What
format 2.0 itself says is held by `tests/shared/test_formats.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from shared.store.company import ServiceLine
from shared.store.release import FORMAT, RELEASE, REVISION
from tests.mesh.running_mesh import RunningMesh, eventually, seqmesh
from tests.mesh.traffic import Callers, Traffic, make_plans

SEQUENCES = 8
LATER = Path(__file__).parents[1] / "fixtures" / "formats" / "later"
LATER_FORMAT = f"{FORMAT.partition('.')[0]}.{REVISION + 1}"


@pytest.mark.timeout(600)
async def test_a_mesh_goes_to_a_later_release_and_back_without_an_error(
    make_mesh: Callable[..., RunningMesh], chance: random.Random, tmp_path: Path
) -> None:
    """One service of each kind, then the other executor: all kinds meet each other in both formats. The second gateway
    stays what it is, so that callers always have one."""
    later = tmp_path / "later"
    later.touch()
    paths = [str(LATER), *filter(None, [os.environ.get("PYTHONPATH")])]
    mesh = make_mesh(
        gateways=2, executors=2, environment={"LATER_RELEASE": str(later), "PYTHONPATH": os.pathsep.join(paths)}
    )
    services = ["executor-1", "gateway-1", "scheduler-1", "executor-2"]
    over = asyncio.Event()
    shown = ""
    async with Callers(mesh, streams=True) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True, pause_s=0.05, numbered=True)
        running = group.create_task(traffic.run_until(over))
        await traffic.more(4 * SEQUENCES)
        for position, name in enumerate(services):
            later.write_text("\n".join(services[: position + 1]))
            await mesh.restart(name)
            await traffic.more(4 * SEQUENCES)
            if position == 1:
                await eventually(lambda: {FORMAT, LATER_FORMAT} <= formats(mesh), "both formats are told")
                shown = await seqmesh(mesh, "drain", "--list")
        # The registrations of the executors that left stay until a scheduler forgets them.
        await eventually(
            lambda: all(map(is_later, mesh.redis.hvals(mesh.keys.executors))), "later ones alone are there"
        )
        for position, name in enumerate(services):
            later.write_text("\n".join(services[position + 1 :]))
            await mesh.restart(name)
            await traffic.more(4 * SEQUENCES)
        over.set()
        await running

    print(f"{traffic.answered} answered, {traffic.repeated} repeated, longest gap {traffic.slowest_s:.2f} s")
    assert f"release later, format {LATER_FORMAT}: " in shown
    assert f"release {RELEASE}, format {FORMAT}: " in shown
    assert any("a service of another format is in the mesh" in mesh.log(name) for name in services)
    assert [] == mesh.tracebacks()


def is_later(registration: bytes) -> bool:
    """Whether an executor of the later release has written it."""
    return b"of a later release" in registration


def formats(mesh: RunningMesh) -> set[str]:
    """What the services say of themselves."""
    data: Iterable[bytes] = mesh.redis.hvals(mesh.keys.services)
    return {msgspec.json.decode(line, type=ServiceLine).format for line in data}
