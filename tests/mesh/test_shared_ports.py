"""Three gateways on one HTTP port and one gRPC port, as `seqmesh up --gateways 3` runs them.

Clients know the two ports alone. Each of their connections is one gateway's, which the system has chosen.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Iterator

import pytest

from tests.mesh.model_repository import SAMPLES
from tests.mesh.raw_http import get
from tests.mesh.running_mesh import RunningMesh, running_mesh
from tests.mesh.traffic import Callers, GrpcCaller, HttpCaller, Step, Traffic, make_plans, sum_of, tensor

GATEWAYS = 3
SEQUENCES = 8
ROUNDS = 2
STEPS = 64
"""Over connections of their own: that none of them reaches one of three gateways happens once in 10^11 times."""


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    directory = tmp_path_factory.mktemp("shared-ports") / "data"
    environment = {"SEQMESH_SHARE_PORTS": "true"}
    with running_mesh(directory, [SAMPLES], gateways=GATEWAYS, environment=environment) as mesh:
        yield mesh


class FreshHttpCaller(HttpCaller):
    """Opens a connection for each step."""

    async def __call__(self, model: str, step: Step) -> int:
        caller = HttpCaller(self.url)
        try:
            return await caller(model, step)
        finally:
            await caller.close()


class FreshGrpcCaller(GrpcCaller):
    """Opens a connection for each step, which it shares with no other channel."""

    async def __call__(self, model: str, step: Step) -> int:
        alone = [("grpc.use_local_subchannel_pool", 1)]
        async with self.library.InferenceServerClient(self.url, channel_args=alone) as client:
            return sum_of(await client.infer(model, [tensor(self.library.InferInput, step.value)], **step.flags))


def submitted(mesh: RunningMesh) -> list[int]:
    """How many requests each gateway has sent on."""
    pages = [get(f"{mesh.state.host}:{one.metrics_port}", "/metrics").body.decode() for one in mesh.gateways]
    return [int(re.findall(r"^seqmesh_gateway_submitted_total (\d+)$", page, re.MULTILINE)[0]) for page in pages]


def test_they_share_two_ports_and_each_has_metrics_of_its_own(sharing: RunningMesh) -> None:
    assert 1 == len({(one.http_port, one.grpc_port) for one in sharing.gateways})
    assert GATEWAYS == len({one.metrics_port for one in sharing.gateways})


@pytest.mark.parametrize("fresh", [FreshHttpCaller, FreshGrpcCaller])
async def test_connections_are_spread_over_all_gateways(
    sharing: RunningMesh, fresh: type[FreshHttpCaller | FreshGrpcCaller]
) -> None:
    """And the steps of a sequence are one sequence, whichever gateways they come through."""
    before = submitted(sharing)
    caller = fresh(sharing.http() if fresh is FreshHttpCaller else sharing.grpc())
    sums = [
        await caller("running_sum", Step(7, 1, start=number == 0, end=number == STEPS - 1)) for number in range(STEPS)
    ]
    await caller.close()

    assert list(range(1, STEPS + 1)) == sums
    assert all(now > then for now, then in zip(submitted(sharing), before, strict=True))


@pytest.mark.timeout(240)
async def test_new_connections_notice_nothing_while_gateways_restart_again_and_again(
    sharing: RunningMesh, chance: random.Random
) -> None:
    """Each step has a connection of its own, and no step is ever sent twice."""
    over = asyncio.Event()
    callers = [FreshHttpCaller(sharing.http()), FreshGrpcCaller(sharing.grpc())]
    traffic = Traffic("running_sum", callers, make_plans(chance, SEQUENCES), chance)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(traffic.run_until(over))
        for name in sharing.names("gateway") * ROUNDS:
            await traffic.more(4 * SEQUENCES)
            await sharing.restart(name)
        over.set()
        await running
    for caller in callers:
        await caller.close()

    assert 0 == traffic.repeated
    print(f"longest wait {traffic.slowest_s:.2f} s, {traffic.answered} answered")


@pytest.mark.timeout(240)
async def test_clients_that_repeat_survive_a_gateway_that_is_killed(
    sharing: RunningMesh, chance: random.Random
) -> None:
    """Over the same two addresses: the next connection reaches a gateway that lives."""
    over = asyncio.Event()
    async with Callers(sharing, streams=True) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES)
        traffic = Traffic("running_sum", callers, plans, chance, retries=True, numbered=True)
        running = group.create_task(traffic.run_until(over))
        for name in sharing.names("gateway"):
            await traffic.more(4 * SEQUENCES)
            await sharing.restart(name, signal.SIGKILL)
            await traffic.more(4 * SEQUENCES)
        over.set()
        await running

    assert not sharing.tracebacks()
    print(f"longest wait {traffic.slowest_s:.2f} s, {traffic.answered} answered, {traffic.repeated} repeated")
