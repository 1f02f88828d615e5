"""The gateway's statistics when Redis takes no writes: an error that says so, and a page without the mesh's part."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.models.catalog import Catalog, CatalogView
from gateway.models.metrics import Metrics
from gateway.models.observation import Observation
from gateway.models.statistics import Statistics
from shared.contract.messages import ModelRecord
from shared.contract.model_config import ModelConfig
from shared.statistics.metrics_config import MetricsConfig
from shared.statistics.tally import FailureReason, failure, packed
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.redis_client import connect
from shared.store.scripts import Scripts
from shared.store.totals import Tallies
from tests.embedded_redis import EmbeddedRedis

RECORD = ModelRecord(ModelConfig("m", "python", "", 8, (), ()), "{}", ("1",), "5-0")


async def test_statistics_survive_a_redis_without_memory(
    private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = connect(private_server.url)
    untyped = cast("Any", redis)
    keys = Keyspace()
    scripts = Scripts(redis, keys)
    catalog = Catalog(Membership(redis, keys))
    monkeypatch.setattr(catalog, "view", CatalogView(records={"m": RECORD}, ready={"m": ("1",)}))
    observation = Observation(redis, keys, catalog)
    tallies = Tallies(scripts, keys)
    statistics = Statistics(tallies, catalog, observation)
    page = Metrics(catalog, statistics, observation, [], MetricsConfig())
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
