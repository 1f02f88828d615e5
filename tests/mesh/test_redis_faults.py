"""Whatever happens between the services and Redis, and to Redis itself: every sum must still be right.

One mesh, whose services reach Redis through a proxy that misbehaves; clients number their steps and ask again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import pytest
from redis import Redis

from deploy.chaos.proxy import Way
from shared.store.keyspace import Keyspace
from shared.store.libraries import library
from tests.embedded_redis import EmbeddedRedis
from tests.mesh.conftest import wait_until_equal
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh
from tests.mesh.traffic import Callers, Plan, Player, Traffic, make_plans
from tests.redis_proxy import Loss, RedisProxy

MODEL = "running_sum"
SEQUENCES = 16
TIMEOUT_MS = 1000
"""After which a silent Redis counts as lost: short, so that a test need not wait long for it."""


@dataclass(frozen=True)
class Broken:
    """A mesh, and what lies between it and its Redis."""

    mesh: RunningMesh
    proxy: RedisProxy
    server: EmbeddedRedis

    @property
    def direct(self) -> Redis:
        """A client of the server that the proxy does not touch."""
        return Redis.from_url(self.server.url)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    directory = tmp_path_factory.mktemp("redis-faults")
    add_sum_model(directory / "models", MODEL)
    with (
        EmbeddedRedis(directory / "redis", appendfsync="always") as server,
        RedisProxy(server.url) as proxy,
        running_mesh(
            directory / "data",
            [directory / "models"],
            gateways=2,
            executors=2,
            environment={
                "SEQMESH_REDIS_URL": proxy.url,
                "SEQMESH_REDIS_TIMEOUT_MS": str(TIMEOUT_MS),
                # So that each sequence needs a call of the leader, which can be lost.
                "SEQMESH_SPARE_SLOTS": "0",
            },
        ) as mesh,
    ):
        yield Broken(mesh, proxy, server)


@pytest.fixture
def broken(whole: Broken) -> Iterator[Broken]:
    """The mesh, for faults of which no process may die or complain."""
    mesh = whole.mesh
    deaths, tracebacks = mesh.deaths(), mesh.tracebacks()
    yield whole
    whole.proxy.heal()
    assert (deaths, tracebacks) == (mesh.deaths(), mesh.tracebacks())
    wait_until_equal(0, lambda: mesh.slots_held(MODEL), "slots held")
    wait_until_equal([], mesh.leaks, "keys left without TTL")


@asynccontextmanager
async def under_load(broken: Broken, chance: random.Random) -> AsyncGenerator[Traffic]:
    """Sequences over every gateway and both protocols, checked when the block ends."""
    async with Callers(broken.mesh) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES, shortest=20, longest=30)
        traffic = Traffic(MODEL, callers, plans, chance, retries=True, pause_s=0.01, numbered=True)
        group.create_task(traffic.run())
        yield traffic


async def test_sums_are_right_though_every_service_loses_its_connections_in_turn(
    broken: Broken, chance: random.Random
) -> None:
    async with under_load(broken, chance) as traffic:
        names = ["executor-1", "gateway-1", "scheduler-1", "executor-2", "gateway-2", "", "executor", "gateway"]
        for turn, name in enumerate(names):
            await traffic.progress((turn + 1) / (len(names) + 1))
            assert broken.proxy.cut(name) > 0


@pytest.mark.parametrize("loss", Loss)
async def test_sums_are_right_though_single_calls_are_lost_on_their_way_or_their_answers_are(
    broken: Broken, chance: random.Random, loss: Loss
) -> None:
    traps = [
        broken.proxy.trap(library(broken.mesh.keys.prefix).function(script).encode(), loss, times=times)
        for script, times in (("submit", 6), ("assign", 2), ("commit", 6))
    ]
    async with under_load(broken, chance):
        pass
    assert [6, 2, 6] == [trap.sprung for trap in traps]


async def test_sums_are_right_over_slow_connections(broken: Broken, chance: random.Random) -> None:
    broken.proxy.delay(0.02)
    async with under_load(broken, chance) as traffic:
        await traffic.progress(0.5)
        broken.proxy.delay(0.0)
        broken.proxy.delay(0.1, "executor-1", Way.REPLIES)
    assert 0 == traffic.repeated


async def test_sums_are_right_though_connections_are_half_open(broken: Broken, chance: random.Random) -> None:
    """Nobody hears of their end, neither the service nor Redis."""
    async with under_load(broken, chance) as traffic:
        for share, name in ((0.2, "gateway-1"), (0.5, "executor-2"), (0.7, "scheduler-1")):
            await traffic.progress(share)
            assert broken.proxy.strand(name) > 0


async def test_sums_are_right_though_calls_arrive_after_their_senders_have_given_them_up(
    broken: Broken, chance: random.Random
) -> None:
    """What was sent on the old connection is carried out after the same on the new one."""
    async with under_load(broken, chance) as traffic:
        for share, name in ((0.2, "gateway"), (0.5, "executor"), (0.7, "scheduler")):
            await traffic.progress(share)
            broken.proxy.hold(name, Way.REQUESTS)
            await asyncio.sleep(0.1)
            broken.proxy.hang_up(name)
            broken.proxy.release()


async def test_sums_are_right_though_an_executor_is_cut_off_for_longer_than_its_lease(
    broken: Broken, chance: random.Random
) -> None:
    async with under_load(broken, chance) as traffic:
        await traffic.progress(0.3)
        broken.proxy.refuse("executor-1")
        await eventually(lambda: "executor-1" not in {one.name for one in broken.mesh.alive()}, "its lease ends")
        await traffic.progress(0.5)
        broken.proxy.admit()
        await eventually(lambda: "executor-1" in {one.name for one in broken.mesh.alive()}, "it is back")


async def test_what_a_cut_off_executor_commits_too_late_is_refused_and_counted_and_nobody_sees_more_than_latency(
    broken: Broken, chance: random.Random
) -> None:
    """What it sends lies on its way until its lease has ended and others own its sequences."""
    over = asyncio.Event()
    keys = Keyspace()

    def counted(name: str) -> int:
        lines = (broken.direct.hget(keys.line(shard, MODEL), f"{name}:1") for shard in keys.shards)
        return sum(int(cast("bytes", number) or 0) for number in lines)

    refused, lost = counted("refused"), counted("lost")
    async with Callers(broken.mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(MODEL, callers, make_plans(chance, SEQUENCES), chance, pause_s=0.01)
        group.create_task(traffic.run_until(over))
        # Its commits may just not have been on their way.
        while counted("refused") == refused:
            await traffic.more(50)
            broken.proxy.hold("executor-1", Way.REQUESTS)
            await eventually(lambda: "executor-1" not in {one.name for one in broken.mesh.alive()}, "its lease ends")
            # Others go on.
            await traffic.more(50)
            broken.proxy.release()
            await eventually(lambda: "executor-1" in {one.name for one in broken.mesh.alive()}, "it registers anew")
        over.set()
    assert lost < counted("lost")


async def test_sums_are_right_though_redis_is_restarted(broken: Broken, chance: random.Random) -> None:
    """SIGTERM and SIGKILL under `appendfsync always`: what was acknowledged is there again."""
    async with under_load(broken, chance) as traffic:
        for share, end in ((0.3, broken.server.stop), (0.6, broken.server.kill)):
            await traffic.progress(share)
            end()
            # Here, not in another thread: it would end with that thread (`deploy.local.tether`).
            broken.server.start()
    both = {"executor-1", "executor-2"}
    await eventually(lambda: both == {one.name for one in broken.mesh.alive()}, "both executors take part")


# -- older data --------------------------------------------------------------------------------------------------------


async def test_a_redis_that_comes_back_with_older_data_is_believed_and_nothing_is_mixed(
    broken: Broken, chance: random.Random
) -> None:
    """Killed, and restored from a copy of its directory: as after a failover to a replica that lagged.

    What was acknowledged since is lost, which nobody can help. But states in arenas are those that Redis holds, numbers
    of steps go on from the older ones, and no step is taken twice or left out of what follows.
    """
    plans = [Plan(f"older {number}", tuple(range(1, 31))) for number in range(8)]
    before = {one.executor for one in broken.mesh.alive()}
    data = broken.server.data_dir / "appendonlydir"
    copy = broken.server.data_dir / "copy"
    async with Callers(broken.mesh) as callers:
        players = [Player(plan, callers, chance) for plan in plans]
        old, new = players[:6], players[6:]

        await asyncio.gather(*(player.play(5) for player in old))
        shutil.copytree(data, copy)
        await asyncio.gather(*(player.play(15 if player in old else 6) for player in players))
        broken.server.kill()
        shutil.rmtree(data)
        copy.rename(data)
        broken.server.start()
        await asyncio.gather(*(player.play(30) for player in players))

    assert [10] * 6 == [player.forgotten for player in old]
    assert [6] * 2 == [player.forgotten for player in new]
    # One that had none of these sequences may notice last.
    await eventually(lambda: before.isdisjoint({one.executor for one in broken.mesh.alive()}), "all begin anew")
