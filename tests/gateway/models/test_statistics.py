"""The gateway's statistics and its page of metrics while Redis has no memory, takes no writes, or is silent."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any, NamedTuple, cast

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as om

from gateway.models import metrics
from gateway.models.catalog import Catalog, CatalogView
from gateway.models.exposition import Family
from gateway.models.metrics import Metrics
from gateway.models.observation import Observation, Observed
from gateway.models.statistics import Statistics
from shared.contract.ids import ShardId
from shared.contract.messages import ModelRecord
from shared.contract.model_config import ModelConfig
from shared.statistics.metrics_config import MetricsConfig
from shared.statistics.reports import CustomFamily, ExecutorReport, HostReport, Sample
from shared.statistics.tally import FailureReason, ModelLoad, failure, packed
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.metering import Metering
from shared.store.scripts import Scripts
from shared.store.totals import Tallies
from tests.embedded_cluster import EmbeddedCluster
from tests.embedded_redis import EmbeddedRedis

LIMIT_S = metrics.MESH_LIMIT_S
RECORD = ModelRecord(ModelConfig("m", "python", "", 8, (), ()), "{}", ("1",), "5-0")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is not without the mesh because this process was slow."""
    for limit_s in ("MESH_LIMIT_S", "REDIS_LIMIT_S", "NODE_LIMIT_S"):
        monkeypatch.setattr(metrics, limit_s, 60)


class Gateway(NamedTuple):
    """What a gateway tells of its mesh."""

    keys: Keyspace
    tallies: Tallies
    statistics: Statistics
    page: Metrics


def gateway_of(redis: Redis, key_prefix: str, *records: ModelRecord, shards: int | Sequence[ShardId] = 1) -> Gateway:
    """Of a mesh in which these models are READY."""
    keys = Keyspace(key_prefix, shards)
    scripts, catalog = Scripts(redis, keys), Catalog(Membership(redis, keys))
    by_name = {record.config.name: record for record in records}
    catalog.view = CatalogView(by_name, {name: record.versions for name, record in by_name.items()})
    observation, tallies = Observation(redis, keys, catalog), Tallies(scripts, keys)
    statistics = Statistics(tallies, catalog, observation)
    metering = Metering(scripts, keys, list)
    return Gateway(keys, tallies, statistics, Metrics(catalog, statistics, observation, [], MetricsConfig(), metering))


async def test_requests_are_answered_while_a_page_is_made(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a thousand models takes most of a second."""
    begun, others_ran = threading.Event(), threading.Event()
    waited: list[bool] = []

    def slow(*_: object) -> list[Family]:
        begun.set()
        waited.append(others_ran.wait(60))
        return [SlowFamily("slow", "gauge", "", [])]

    class SlowFamily(Family):
        def lines(self) -> Iterable[str]:
            others_ran.clear()
            slow()
            return []

    async def others() -> None:
        while True:
            if begun.is_set():
                begun.clear()
                others_ran.set()
            await asyncio.sleep(0.001)

    monkeypatch.setattr(metrics, "inference_families", slow)
    other = asyncio.create_task(others())
    await gateway_of(redis, key_prefix).page.render()
    other.cancel()

    assert [True, True] == waited


async def test_those_who_ask_at_once_cost_as_much_as_one(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page takes tens of milliseconds: five hundred clients that asked for it kept the gateway from its steps."""
    _, tallies, statistics, page = gateway_of(redis, key_prefix, RECORD)
    asked = list[Sequence[ModelLoad]]()
    read = tallies.read

    async def noted(loads: Sequence[ModelLoad]) -> dict[ModelLoad, dict[str, int]]:
        asked.append(loads)
        return await read(loads)

    monkeypatch.setattr(tallies, "read", noted)
    await asyncio.gather(*(statistics.read("m") for _ in range(20)))
    assert 1 == len(asked)
    await asyncio.gather(*(page.render() for _ in range(20)))

    assert 3 == len(asked), "those of the page's models, and of the mesh"


async def test_statistics_survive_a_redis_without_memory(private_server: EmbeddedRedis) -> None:
    redis = connect(private_server.url)
    untyped = cast("Any", redis)
    keys, _, statistics, page = gateway_of(redis, Keyspace().prefix, RECORD)
    tally = keys.tally(keys.home_shard("m"), "m", "1", "5-0")
    await untyped.rpush(tally, packed(failure(FailureReason.BACKEND, total_ns=7)))
    assert 1 == (await statistics.read("m"))[0].failures["BACKEND"]
    assert b'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 1\n' in await page.render()

    await untyped.rpush(tally, packed(failure(FailureReason.BACKEND, total_ns=7)))
    await untyped.config_set("maxmemory", 1)

    assert 2 == (await statistics.read("m"))[0].failures["BACKEND"]
    assert b'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 2\n' in await page.render()
    await untyped.config_set("maxmemory", 0)
    await redis.aclose()


async def test_the_page_tells_what_is_wrong_with_a_redis_that_takes_no_writes(private_server: EmbeddedRedis) -> None:
    """Else the alerts on the server's disk and memory would be silent in the very case that they are for."""
    redis = connect(private_server.url, retries=0)
    page = gateway_of(redis, Keyspace().prefix).page
    assert b"seqmesh_gateway_mesh_up 1.0\n" in await page.render()

    await cast("Any", redis).config_set("min-replicas-to-write", 1)

    told = await page.render()
    assert b"seqmesh_gateway_mesh_up 0.0\n" in told
    assert b"seqmesh_redis_log_written 1.0\n" in told
    assert b"\nseqmesh_redis_memory_used_bytes " in told
    await cast("Any", redis).config_set("min-replicas-to-write", 0)
    await redis.aclose()


@pytest.mark.parametrize("frozen", [False, True])
async def test_the_page_tells_of_each_node_of_a_cluster_and_of_those_that_are_left(
    private_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, *, frozen: bool
) -> None:
    async with connect(private_cluster.url, retries=0) as redis:
        keys = await join_mesh(redis, Keyspace().prefix)
        page = gateway_of(redis, keys.prefix, shards=keys.shards).page

        def nodes(told: bytes) -> list[int]:
            figures = re.findall(rb'seqmesh_redis_memory_used_bytes{node="127.0.0.1:(\d+)"} [1-9]', told)
            return sorted(map(int, figures))

        whole = await page.render()
        gone = private_cluster.holder("0")
        monkeypatch.setattr(metrics, "MESH_LIMIT_S", 0.1 if frozen else LIMIT_S)
        if frozen:
            os.kill(gone.pid, signal.SIGSTOP)
            monkeypatch.setattr(metrics, "NODE_LIMIT_S", 2)
        else:
            gone.kill()
        left = await page.render()

    ports = sorted(node.port for node in private_cluster.nodes)
    assert (True, ports) == (b"seqmesh_gateway_mesh_up 1.0\n" in whole, nodes(whole))
    ports.remove(gone.port)
    assert (True, ports) == (b"seqmesh_gateway_mesh_up 0.0\n" in left, nodes(left))


async def test_the_page_comes_although_redis_is_silent(
    private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = connect(private_server.url)
    page = gateway_of(redis, Keyspace().prefix).page
    monkeypatch.setattr(metrics, "MESH_LIMIT_S", 0.01)
    monkeypatch.setattr(metrics, "REDIS_LIMIT_S", 0.01)

    async def silence(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Tallies, "read", silence)
    monkeypatch.setattr(Observation, "redis_figures", silence)

    told = await page.render()

    assert b"seqmesh_gateway_mesh_up 0.0\n" in told
    assert b"\nprocess_cpu_seconds_total " in told
    await redis.aclose()


async def test_a_models_metric_that_is_named_like_one_of_the_mesh_is_left_out_of_the_page(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of OpenMetrics with a family that comes twice is refused as a whole."""
    named = ("nv_cpu_utilization", "seqmesh_gateway_mesh_up", "process_start_time_seconds", "of_the_model")
    families = tuple(CustomFamily(name, "gauge", "A model's", (Sample("", {}, 7.0),)) for name in named)
    report = ExecutorReport("a", "h", HostReport(0.5, 1, 1), families=families)

    async def look(_: Observation) -> Observed:
        return Observed((report,), {})

    monkeypatch.setattr(Observation, "look", look)
    page = gateway_of(redis, key_prefix).page

    parsers: dict[bool, Any] = {False: parser.text_fd_to_metric_families, True: om.text_fd_to_metric_families}
    for openmetrics, parse in parsers.items():
        text = (await page.render(openmetrics=openmetrics)).decode()
        found = [metric.name for metric in parse(StringIO(text))]
        assert sorted(set(found)) == sorted(found)
        assert "of_the_model" in found
    assert sorted(named[:3]) == [vars(record)["fields"]["metric"] for record in caplog.records], "once"
