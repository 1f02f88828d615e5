"""A private mesh is started again when a port was taken before it could listen, and for no other reason; and what hits
its Redis does so one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click
import pytest
import redis

from deploy.chaos.faults import KINDS, Act
from deploy.chaos.models import write_repository
from deploy.chaos.own_mesh import START_ATTEMPTS, foreign, own_mesh, started
from deploy.chaos.own_redis import OwnCluster, OwnFailover, OwnServer
from deploy.local.data_directory import LauncherError
from shared.store.connections.redis_client import connect


@pytest.mark.parametrize(
    ("complaints", "starts", "fails"),
    [
        ([], 1, False),
        (["gRPC cannot listen on 127.0.0.1:9"], 2, False),
        (["HTTP cannot listen on 127.0.0.1:9"] * 9, START_ATTEMPTS, True),
        (["the model has no version"], 1, True),
    ],
)
def test_a_taken_port_is_tried_again_with_another(complaints: list[str], starts: int, fails: bool) -> None:
    begun: list[int] = []

    @contextmanager
    def mesh() -> Generator[Any]:
        begun.append(1)
        if len(begun) <= len(complaints):
            raise LauncherError(complaints[len(begun) - 1])
        yield "a mesh"

    with contextlib.ExitStack() as stack:
        if fails:
            with pytest.raises(LauncherError):
                started(stack, mesh)
        else:
            assert "a mesh" == cast("Any", started(stack, mesh))
    assert starts == len(begun)


@pytest.mark.parametrize("name", ["notes.txt", "models/mine/config.pbtxt"])
def test_a_folder_with_other_things_in_it_is_not_removed_for_a_mesh(tmp_path: Path, name: str) -> None:
    write_repository(tmp_path / "models")
    assert [] == foreign(tmp_path) == foreign(tmp_path / "absent")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("of somebody")

    with pytest.raises(click.UsageError, match="has other things in it"):
        own_mesh(tmp_path, lease_ms=1000, sentinels=False).__enter__()
    assert "of somebody" == (tmp_path / name).read_text()


async def test_a_server_that_is_hit_twice_at_the_same_time_is_hit_when_it_is_back(tmp_path: Path) -> None:
    # The second fault looked for the process of a server that the first one was starting again, and ended the run.
    with OwnServer(tmp_path) as server:
        first = process_of(server)
        await asyncio.gather(*(server.strike(act, 0.01) for act in (Act.RESTART, Act.BLINK, Act.KILL, Act.FREEZE)))

        assert first != process_of(server)


async def test_a_primary_of_a_cluster_is_replaced_and_comes_back_as_a_replica(tmp_path: Path) -> None:
    with OwnCluster(tmp_path, node_timeout_ms=1000) as cluster:
        before = primaries_of(cluster)
        await cluster.strike(Act.KILL, 0.0)

        async with connect(cluster.url) as client:
            assert 3 == len(before & primaries_of(cluster)) + 1
            assert await client.ping()


async def test_a_node_of_a_cluster_is_lost_and_comes_back_in_its_place(tmp_path: Path) -> None:
    with OwnCluster(tmp_path, node_timeout_ms=1000) as cluster:
        before = primaries_of(cluster)
        await cluster.strike(Act.LOSE, 2.0)

        async with connect(cluster.url) as client:
            assert 3 == len(primaries_of(cluster)) == len(before)
            assert await client.ping()


def primaries_of(cluster: OwnCluster) -> set[int]:
    return {node.port for node in cluster.primaries}


def process_of(server: OwnServer) -> int:
    with cast("Any", redis.Redis.from_url(server.url)) as client:
        return client.info("server")["process_id"]


def test_faults_are_those_that_this_redis_can_take(tmp_path: Path) -> None:
    links = {name for name in KINDS if name.endswith("redis-links")}
    assert set(KINDS) - {"promote-replica", "lose-node"} == set(OwnServer(tmp_path).kinds)
    assert set(KINDS) - links - {"lose-node"} == set(OwnFailover(tmp_path, down_after_ms=1000).kinds)
    assert set(KINDS) - links - {"promote-replica"} == set(OwnCluster(tmp_path, node_timeout_ms=1000).kinds)
