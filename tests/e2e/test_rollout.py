"""A rolling update under load, as the chart has Kubernetes do it: a new container, and then an old one stops.

Every gateway is behind one address for each protocol. A gateway that is to go is an endpoint a little longer, because
nodes hear of it late. Until then it serves, which is what the chart's preStop is for, and then it gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.compose_mesh import ComposeMesh, docker
from tests.e2e.open_sums import MODEL
from tests.e2e.service_address import ServiceAddress, service_address
from tests.mesh.running_mesh import eventually
from tests.mesh.traffic import GrpcCaller, HttpCaller, Step, StreamCaller, Traffic, make_plans

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

REPLICAS = 2
SEQUENCES = 12
"""Of each kind of client."""
PAUSE_S = 0.4
LATE = 6
"""Connections that a gateway gets after it was told to go."""
PATIENCE_S = 240.0
HTTP, GRPC = 8000, 8001


class HttpStranger(HttpCaller):
    """A connection for each step, as from a client that comes for the first time."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, model: str, step: Step) -> int:
        caller = HttpCaller(self._url)
        try:
            return await caller(model, step)
        finally:
            await caller.close()

    async def close(self) -> None:
        """Nothing is kept."""


class Gateways:
    """The addresses of the gateways' ports."""

    def __init__(self, mesh: ComposeMesh, http: ServiceAddress, grpc: ServiceAddress) -> None:
        self._mesh = mesh
        self.addresses = {HTTP: http, GRPC: grpc}

    def serve(self) -> None:
        """Every gateway that runs is an endpoint."""
        found = self._mesh.containers("gateway")
        for port, address in self.addresses.items():
            address.endpoints = [self._mesh.address(port, container) for container in found]

    async def leave_out(self, container: str) -> None:
        """It is an endpoint until it has got some connections more."""
        http = self.addresses[HTTP]
        leaving = {port: self._mesh.address(port, container) for port in self.addresses}
        enough = http.made[leaving[HTTP]] + LATE
        await eventually(lambda: http.made[leaving[HTTP]] >= enough, "the gateway gets connections", PATIENCE_S)
        for port, address in self.addresses.items():
            address.endpoints = [one for one in address.endpoints if one != leaving[port]]


@asynccontextmanager
async def gateways_of(mesh: ComposeMesh, chance: random.Random) -> AsyncGenerator[Gateways]:
    """All gateways, behind one address for each protocol."""
    async with service_address(chance) as http, service_address(chance) as grpc:
        gateways = Gateways(mesh, http, grpc)
        gateways.serve()
        yield gateways


async def test_nobody_sees_an_error_though_every_container_is_replaced(
    mesh: ComposeMesh, chance: random.Random
) -> None:
    """Who keeps connections to a gateway may lose one, and sends its step again by its number. Nobody else has to."""
    await asyncio.to_thread(mesh.up, **dict.fromkeys(("gateway", "scheduler", "executor"), REPLICAS))
    before = {service: mesh.containers(service) for service in ("executor", "scheduler", "gateway")}
    over = asyncio.Event()
    async with gateways_of(mesh, chance) as gateways, asyncio.TaskGroup() as group:
        http, grpc = (gateways.addresses[port].url for port in (HTTP, GRPC))
        regulars = [HttpCaller(http), GrpcCaller(grpc), StreamCaller(grpc)]
        kept, fresh = (
            Traffic(MODEL, callers, make_plans(chance, SEQUENCES), chance, retries, PAUSE_S, numbered=True)
            for callers, retries in ((regulars, True), ([HttpStranger(http)], False))
        )
        playing = [group.create_task(traffic.run_until(over)) for traffic in (kept, fresh)]
        await answered_more(kept, fresh)
        for service, containers in before.items():
            for container in containers:
                await asyncio.to_thread(mesh.up, **{**dict.fromkeys(before, REPLICAS), service: REPLICAS + 1})
                gateways.serve()
                if service == "gateway":
                    await gateways.leave_out(container)
                await asyncio.to_thread(remove, mesh, container)
                await answered_more(kept, fresh)
            print(f"{service}: {kept.answered + fresh.answered} answered, {kept.repeated} sent again")
            print("\n".join(f"{count} x {text}" for text, count in kept.interruptions.items()))
            assert kept.repeated == 0 or service == "gateway"
        over.set()
        await asyncio.gather(*playing)
        for caller in regulars:
            await caller.close()

    after = {service: mesh.containers(service) for service in before}
    assert dict.fromkeys(before, REPLICAS) == {service: len(found) for service, found in after.items()}
    assert not {one for found in before.values() for one in found} & {one for found in after.values() for one in found}


async def answered_more(*all_traffic: Traffic) -> None:
    """Returns when each sequence has had some more answers."""
    goals = [(traffic, traffic.answered + 4 * SEQUENCES) for traffic in all_traffic]
    await eventually(lambda: all(one.answered >= goal for one, goal in goals), "steps are answered", PATIENCE_S)


def remove(mesh: ComposeMesh, container: str) -> None:
    """Stops a container within its grace period, and removes it. 137: it had to be killed."""
    docker("stop", "--time", str(mesh.inspect(container)["Config"]["StopTimeout"]), container)
    assert 0 == mesh.inspect(container)["State"]["ExitCode"]
    docker("rm", container)
