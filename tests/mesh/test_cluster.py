"""A mesh on a Redis Cluster: whatever becomes of its nodes, every sum must be right.

Two Clusters: one whose primaries have a replica each, which takes a killed primary's place, and one without any, where
the keys of a node that is away wait for it while all others are served.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deploy.chaos.node import Node
from shared.contract.ids import sequence_id
from shared.store.connections.homes import MESH_TAG, tag_of
from tests.embedded_cluster import EmbeddedCluster, ask
from tests.mesh.conftest import wait_until_equal
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh
from tests.mesh.traffic import Call, Callers, Plan, Player, Step, Traffic, make_plans

MODEL = "running_sum"
SEQUENCES = 16
TIMEOUT_MS = 2000
"""After which a silent node counts as lost: short, so that a test need not wait long for it."""
LEASE_MS = 4000
"""Of executors and schedulers: a busy machine must not cost them their lease. Nor may an executor be forgotten that a
stale replica brings back."""


@dataclass(frozen=True)
class Clustered:
    """A mesh and its Cluster."""

    mesh: RunningMesh
    cluster: EmbeddedCluster

    def holder(self, tag: object) -> Node:
        return self.cluster.holder(str(tag))

    @property
    def shards(self) -> list[str]:
        """Their tags."""
        return [tag_of(self.mesh.keys.base(shard)) for shard in self.mesh.keys.shards]

    def apart(self) -> Node:
        """A node that does not hold the mesh's own keys."""
        return next(node for tag in self.shards if (node := self.holder(tag)) is not self.holder(MESH_TAG))

    def tags_at(self, node: Node) -> list[str]:
        """The tags of the shards that a node holds."""
        return [tag for tag in self.shards if self.holder(tag) is node]


@contextmanager
def clustered(directory: Path, *, replicas: int) -> Generator[Clustered]:
    add_sum_model(directory / "models", MODEL)
    with (
        EmbeddedCluster(directory / "redis", replicas=replicas) as cluster,
        running_mesh(
            directory / "data",
            [directory / "models"],
            gateways=2,
            schedulers=2,
            executors=2,
            environment={
                "SEQMESH_REDIS_URL": cluster.url,
                "SEQMESH_REDIS_TIMEOUT_MS": str(TIMEOUT_MS),
                "SEQMESH_LEASE_MS": str(LEASE_MS),
            },
        ) as mesh,
    ):
        yield Clustered(mesh, cluster)


@pytest.fixture(scope="module")
def shared_bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clustered]:
    with clustered(tmp_path_factory.mktemp("bare"), replicas=0) as whole:
        yield whole


@pytest.fixture(scope="module")
def shared_replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clustered]:
    with clustered(tmp_path_factory.mktemp("replicated"), replicas=1) as whole:
        yield whole


@pytest.fixture
def bare(shared_bare: Clustered) -> Iterator[Clustered]:
    """Without replicas."""
    yield from unharmed(shared_bare)


@pytest.fixture
def replicated(shared_replicated: Clustered) -> Iterator[Clustered]:
    """With a replica of each primary."""
    yield from unharmed(shared_replicated)


def unharmed(whole: Clustered) -> Iterator[Clustered]:
    """Every node lives. Afterwards no process has complained, and nothing is left."""
    mesh = whole.mesh
    tracebacks = mesh.tracebacks()
    yield whole
    whole.cluster.revive()
    assert tracebacks == mesh.tracebacks()
    wait_until_equal(0, lambda: mesh.slots_held(MODEL), "slots held")
    wait_until_equal([], mesh.leaks, "keys left without TTL")


class NamelessTraffic(Traffic):
    """Its steps have neither a request id nor a number: none may be sent twice."""

    async def _call(self, step: Step, chance: random.Random) -> int:
        return await super()._call(replace(step, request_id="", number=0), chance)


@asynccontextmanager
async def under_load(
    whole: Clustered, chance: random.Random, known_by: str = "request id", *, retries: bool = True
) -> AsyncGenerator[Traffic]:
    """Sequences over every gateway and both protocols, until the block ends; then they are checked."""
    over = asyncio.Event()
    async with Callers(whole.mesh) as callers, asyncio.TaskGroup() as group:
        plans = make_plans(chance, SEQUENCES)
        kind = NamelessTraffic if known_by == "nothing" else Traffic
        numbered = known_by == "number"
        traffic = kind(MODEL, callers, plans, chance, retries=retries, pause_s=0.01, numbered=numbered)
        group.create_task(traffic.run_until(over))
        await traffic.more(100)
        yield traffic
        await traffic.more(100)
        over.set()


def plans_of(whole: Clustered, belongs: Callable[[str], bool], name: str) -> list[Plan]:
    """Sequences of the shards whose tag is such."""
    plans: list[Plan] = []
    number = 0
    while len(plans) < SEQUENCES // 2:
        number += 1
        identity = f"{name} {number}"
        shard = whole.mesh.keys.shard_of(sequence_id(MODEL, "", identity))
        if belongs(str(shard)):
            plans.append(Plan(identity, tuple(range(1, 31))))
    return plans


def traffic_of(
    whole: Clustered, callers: Sequence[Call], chance: random.Random, belongs: Callable[[str], bool], name: str
) -> Traffic:
    """Such sequences."""
    return Traffic(MODEL, callers, plans_of(whole, belongs, name), chance, retries=True, pause_s=0.05)


async def leader_of(whole: Clustered) -> str:
    """The scheduler that leads. A busy machine may cost it its lease for a moment."""
    return await eventually(lambda: whole.mesh.leader(MODEL), "somebody leads")


async def led(whole: Clustered) -> None:
    """Waits until somebody leads all shards, and so has noted which slots each has: else nobody leads without a node
    that goes away. The test before may have killed nodes, after which the notes do not count."""
    mesh = whole.mesh
    term = int(mesh.redis.hget(mesh.keys.terms, MODEL) or 0)
    # The lease is taken anew, in another term, of which the log says when it begins.
    mesh.redis.delete(mesh.keys.leader(MODEL))

    def terms() -> list[int]:
        return [int(found) for found in re.findall(rf"leading .*model={MODEL} term=(\d+)", mesh.logs("scheduler"))]

    await eventually(lambda: max(terms(), default=0) > term, "somebody leads")


@pytest.mark.parametrize("known_by", ["request id", "number", "nothing"])
async def test_sums_are_right_over_three_nodes(bare: Clustered, chance: random.Random, known_by: str) -> None:
    assert 3 == len({bare.holder(tag).port for tag in bare.shards})
    async with under_load(bare, chance, known_by, retries=False) as traffic:
        await traffic.more(300)


@pytest.mark.parametrize("known_by", ["request id", "number"])
async def test_callers_wait_and_get_no_error_while_primaries_are_killed_and_replaced(
    replicated: Clustered, chance: random.Random, known_by: str
) -> None:
    """One of a shard, and the one that holds the mesh's own keys."""
    async with under_load(replicated, chance, known_by, retries=False) as traffic:
        for tag in (replicated.shards[0], MESH_TAG):
            killed = replicated.holder(tag)
            replicated.cluster.strike(killed)
            await asyncio.to_thread(replicated.cluster.replaced, killed)
            await traffic.more(100)
            replicated.cluster.revive()


async def test_what_a_stale_replica_lacks_is_told_and_nothing_is_mixed(
    replicated: Clustered, chance: random.Random
) -> None:
    """Steps are numbered on from those that are there. At the other nodes nothing is lost."""
    primary = replicated.apart()
    tags = replicated.tags_at(primary)
    here = plans_of(replicated, lambda tag: tag not in tags, "kept")
    there = plans_of(replicated, lambda tag: tag in tags, "stale")
    async with Callers(replicated.mesh) as callers:
        kept, stale = ([Player(plan, callers, chance) for plan in plans] for plans in (here, there))
        await asyncio.gather(*(player.play(5) for player in (*kept, *stale)))
        replica = replicated.cluster.hold_back(primary)
        await asyncio.gather(*(player.play(15) for player in (*kept, *stale)))
        primary.kill()
        await asyncio.to_thread(replicated.cluster.replaced, primary)
        ask(replica, "CONFIG", "SET", "masteruser", "")
        await asyncio.gather(*(player.play(30) for player in (*kept, *stale)))

    assert [0] * len(kept) == [player.forgotten for player in kept]
    assert [10] * len(stale) == [player.forgotten for player in stale]


@pytest.mark.parametrize("of_mesh", [False, True], ids=["of shards alone", "with the mesh's own keys"])
async def test_while_a_node_is_away_sequences_of_other_shards_go_on_and_its_own_do_afterwards(
    bare: Clustered, chance: random.Random, of_mesh: bool
) -> None:
    node = bare.holder(MESH_TAG) if of_mesh else bare.apart()
    tags = bare.tags_at(node)
    async with Callers(bare.mesh) as callers:
        here = traffic_of(bare, callers, chance, lambda tag: tag not in tags, "here")
        there = traffic_of(bare, callers, chance, lambda tag: tag in tags, "there")
        async with asyncio.TaskGroup() as group:
            for traffic in (here, there):
                group.create_task(traffic.run())
            # Nobody leads while the mesh's own keys are away: what has no slot by then waits.
            await here.all_begun()
            await there.progress(0.3)
            node.kill()
            await here.progress(1.0)
            assert there.answered < there.total
            node.start()


async def test_while_a_node_is_away_sequences_of_other_shards_begin_and_a_dead_executors_are_taken_over(
    bare: Clustered, chance: random.Random
) -> None:
    await led(bare)
    node = bare.apart()
    tags = bare.tags_at(node)
    async with Callers(bare.mesh) as callers, asyncio.TaskGroup() as group:
        early = traffic_of(bare, callers, chance, lambda tag: tag not in tags, "early")
        late = traffic_of(bare, callers, chance, lambda tag: tag not in tags, "late")
        there = traffic_of(bare, callers, chance, lambda tag: tag in tags, "there")
        for traffic in (early, there):
            group.create_task(traffic.run())
        await early.progress(0.2)
        node.kill()
        bare.mesh.kill("executor-1")
        group.create_task(late.run())
        await early.progress(1.0)
        await late.progress(1.0)
        assert there.answered < there.total
        node.start()


async def test_while_a_node_is_away_the_lead_goes_to_another_scheduler_and_sequences_begin_that_find_no_spare_slot(
    bare: Clustered, chance: random.Random
) -> None:
    """And those of a dead executor are taken over, whichever process leads."""
    await led(bare)
    node, leader = bare.apart(), await leader_of(bare)
    tags = bare.tags_at(node)
    async with Callers(bare.mesh) as callers, asyncio.TaskGroup() as group:
        early = traffic_of(bare, callers, chance, lambda tag: tag not in tags, "before")
        late = traffic_of(bare, callers, chance, lambda tag: tag not in tags, "after")
        there = traffic_of(bare, callers, chance, lambda tag: tag in tags, "lost")
        for traffic in (early, there):
            group.create_task(traffic.run())
        await early.progress(0.2)
        node.kill()
        for killed in (leader, "executor-1"):
            bare.mesh.kill(killed)
        group.create_task(late.run())
        await early.progress(1.0)
        await late.progress(1.0)
        assert there.answered < there.total
        node.start()


async def test_the_shards_of_a_restarted_node_go_on_while_another_node_is_away(
    bare: Clustered, chance: random.Random
) -> None:
    await led(bare)
    away = bare.apart()
    restarted = next(node for node in bare.cluster.primaries() if node not in (away, bare.holder(MESH_TAG)))
    async with Callers(bare.mesh) as callers, asyncio.TaskGroup() as group:
        traffic = traffic_of(bare, callers, chance, lambda tag: bare.holder(tag) is restarted, "restarted")
        group.create_task(traffic.run())
        await traffic.progress(0.3)
        away.kill()
        restarted.kill()
        restarted.start()
        await traffic.progress(1.0)
        assert not away.is_running
        away.start()


async def test_sums_are_right_though_the_node_with_the_meshs_own_keys_is_restarted(
    bare: Clustered, chance: random.Random
) -> None:
    async with under_load(bare, chance) as traffic:
        node = bare.holder(MESH_TAG)
        node.kill()
        node.start()
        await traffic.more(300)


async def test_sums_are_right_though_the_whole_cluster_is_restarted(bare: Clustered, chance: random.Random) -> None:
    async with under_load(bare, chance) as traffic:
        for node in bare.cluster.nodes:
            node.kill()
        for node in bare.cluster.nodes:
            node.start()
        await traffic.more(300)


@pytest.mark.parametrize("known_by", ["request id", "number", "nothing"])
async def test_sums_are_right_though_slots_are_moved_to_other_nodes(
    bare: Clustered, chance: random.Random, known_by: str
) -> None:
    async with under_load(bare, chance, known_by, retries=False) as traffic:
        for tag in (bare.shards[0], MESH_TAG):
            source = bare.holder(tag)
            target = next(node for node in bare.cluster.primaries() if node is not source)
            for to in (target, source):
                await asyncio.to_thread(bare.cluster.move, tag, to)
                await traffic.more(100)


async def test_sums_are_right_though_processes_are_killed_and_added(bare: Clustered, chance: random.Random) -> None:
    async with under_load(bare, chance) as traffic:
        with bare.mesh.spare("executor", "executor-3"):
            await eventually(lambda: len(bare.mesh.alive()) == 3, "a third executor takes part")
            await bare.mesh.kill_executor("executor-1")
            await traffic.more(100)
            await bare.mesh.restart(await leader_of(bare))
        await traffic.more(100)


@pytest.mark.parametrize("is_silent", [False, True], ids=["gone", "silent"])
async def test_services_that_start_while_a_node_is_away_serve_the_other_shards_and_its_own_when_it_is_back(
    bare: Clustered, chance: random.Random, *, is_silent: bool
) -> None:
    await led(bare)
    node = bare.apart()
    tags = bare.tags_at(node)
    here, there = (plans_of(bare, lambda tag, of=of: (tag in tags) is of, f"late {of}") for of in (False, True))
    node.send(signal.SIGSTOP) if is_silent else node.kill()
    for name in ("gateway-2", "executor-1", "executor-2"):
        await bare.mesh.restart(name, signal.SIGKILL)
        await eventually(lambda name=name: "redis node away" in bare.mesh.log(name), f"{name} says so")
    async with Callers(bare.mesh) as callers:
        await Traffic(MODEL, callers, here, chance, retries=True).run()
        node.send(signal.SIGCONT) if is_silent else node.start()
        await Traffic(MODEL, callers, there, chance, retries=True).run()


async def test_sums_are_right_though_processes_are_killed_while_nodes_are_away(
    bare: Clustered, chance: random.Random
) -> None:
    async with under_load(bare, chance) as traffic:
        leader = await leader_of(bare)
        for node, killed in zip(bare.cluster.primaries(), ("executor-1", "gateway-1", leader), strict=True):
            node.kill()
            pid = bare.mesh.kill(killed)
            await eventually(lambda: bare.mesh.pid(killed) != pid, "the launcher starts it again")  # noqa: B023 - called at once
            node.start()
            await traffic.more(100)
