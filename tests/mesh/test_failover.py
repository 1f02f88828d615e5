"""Redis fails over under load: callers wait, and what they are told is right.

One mesh behind Sentinels: a primary and two replicas. What a replica had not received when it was made primary is lost,
as after a restart with older data; nobody is told otherwise.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deploy.chaos.replicated import ReplicatedRedis
from tests.mesh.conftest import wait_until_equal
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh, seqmesh
from tests.mesh.traffic import Callers, Plan, Player, Traffic, make_plans

MODEL = "running_sum"
SEQUENCES = 12


@dataclass(frozen=True)
class Replicated:
    """A mesh and its Redis."""

    mesh: RunningMesh
    redis: ReplicatedRedis


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    directory = tmp_path_factory.mktemp("failover")
    add_sum_model(directory / "models", MODEL)
    with (
        ReplicatedRedis(directory / "redis", replicas=2, down_after_ms=2000) as redis,
        running_mesh(
            directory / "data",
            [directory / "models"],
            gateways=2,
            executors=2,
            # A server that is frozen is silent: short, so that a test need not wait long until that is noticed.
            environment={"SEQMESH_REDIS_URL": redis.url, "SEQMESH_REDIS_TIMEOUT_MS": "1000"},
        ) as mesh,
    ):
        yield Replicated(mesh, redis)


@pytest.fixture
def replicated(whole: Replicated) -> Iterator[Replicated]:
    """Every server lives and is in step. Afterwards no process has died or complained, and nothing is left."""
    mesh = whole.mesh
    whole.redis.revive()
    whole.redis.demand_replicas(0)
    deaths, tracebacks = mesh.deaths(), mesh.tracebacks()
    yield whole
    assert (deaths, tracebacks) == (mesh.deaths(), mesh.tracebacks())
    wait_until_equal(0, lambda: mesh.slots_held(MODEL), "slots held")
    wait_until_equal([], mesh.leaks, "keys left without TTL")


async def test_callers_wait_and_get_no_error_while_the_primary_is_killed_and_replaced(
    replicated: Replicated, chance: random.Random
) -> None:
    """Twice, the second time without one of the Sentinels."""
    over = asyncio.Event()
    async with Callers(replicated.mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(MODEL, callers, make_plans(chance, SEQUENCES), chance)
        group.create_task(traffic.run_until(over))
        for _ in range(2):
            await traffic.more(50)
            await asyncio.to_thread(replicated.redis.rejoined)
            killed = replicated.redis.primary()
            await asyncio.to_thread(replicated.redis.strike, killed, signal.SIGKILL)
            await asyncio.to_thread(replicated.redis.replaced, killed)
            await traffic.more(50)
            await asyncio.to_thread(replicated.redis.rejoined)
            replicated.redis.sentinels[0].kill()
        over.set()

    executors = {"executor-1", "executor-2"}
    await eventually(lambda: executors == {one.name for one in replicated.mesh.alive()}, "both executors take part")
    listed = await seqmesh(replicated.mesh, "drain", "--list")
    assert all(name in listed for name in executors)


async def test_what_a_frozen_primary_does_when_it_wakes_up_counts_for_nobody(
    replicated: Replicated, chance: random.Random
) -> None:
    replicated.redis.demand_replicas(1)
    plans = [Plan(f"frozen {number}", tuple(range(1, 41))) for number in range(SEQUENCES)]
    async with Callers(replicated.mesh) as callers:
        players = [Player(plan, callers, chance) for plan in plans]
        await asyncio.gather(*(player.play(10) for player in players))
        going_on = asyncio.gather(*(player.play(40) for player in players))
        stale = replicated.redis.primary()
        await asyncio.to_thread(replicated.redis.strike, stale, signal.SIGSTOP)
        try:
            await asyncio.to_thread(replicated.redis.replaced, stale)
        finally:
            stale.send(signal.SIGCONT)
        await going_on

    assert [0] * SEQUENCES == [player.forgotten for player in players]


async def test_what_a_stale_replica_lacks_is_told_and_nothing_is_mixed(
    replicated: Replicated, chance: random.Random
) -> None:
    """As after a restart with older data: steps are numbered on from those that are there, and states are theirs."""
    plans = [Plan(f"stale {number}", tuple(range(1, 31))) for number in range(8)]
    before = {one.executor for one in replicated.mesh.alive()}
    primary = replicated.redis.primary()
    replicas = [server for server in replicated.redis.servers if server is not primary]
    async with Callers(replicated.mesh) as callers:
        players = [Player(plan, callers, chance) for plan in plans]
        old, new = players[:6], players[6:]
        await asyncio.gather(*(player.play(5) for player in old))
        await asyncio.to_thread(replicated.redis.caught_up)
        for replica in replicas:
            await asyncio.to_thread(replica.hold_back)
        await asyncio.gather(*(player.play(15 if player in old else 6) for player in players))
        primary.kill()
        await asyncio.to_thread(replicated.redis.replaced, primary)
        for replica in replicas:
            replica.let_go_on()
        await asyncio.gather(*(player.play(30) for player in players))

    assert [10] * 6 == [player.forgotten for player in old]
    assert [6] * 2 == [player.forgotten for player in new]
    # One that had none of these sequences may notice last.
    await eventually(lambda: before.isdisjoint({one.executor for one in replicated.mesh.alive()}), "all begin anew")
