"""Fixtures: a gateway without ports before the fake executor, and one behind a proxy that breaks connections."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest

from gateway.parts import GatewayParts
from gateway.settings import GatewaySettings
from shared.store.keyspace import Keyspace
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import Proxy, without_ports
from tests.redis_proxy import through


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings, request: pytest.FixtureRequest) -> GatewaySettings:
    """With those that the test's mark names."""
    mark = request.node.get_closest_marker("settings")
    return gateway_settings if mark is None else dataclasses.replace(gateway_settings, **mark.kwargs)


@pytest.fixture
async def proxy(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    # What a test does while Redis is away may take long.
    monkeypatch.setattr("gateway.requests.exchange.departures.PATIENCE_S", 600.0)
    made = Proxy(redis_url)
    server = await made.start()
    yield made
    server.close()
    made.cut_all()


@pytest.fixture
async def parts(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor
) -> AsyncIterator[GatewayParts]:
    async with without_ports(gateway_settings, keys) as running:
        yield running


@pytest.fixture
async def behind_proxy(
    gateway_settings: GatewaySettings, keys: Keyspace, executor: FakeExecutor, proxy: Proxy
) -> AsyncIterator[GatewayParts]:
    behind = through(f"127.0.0.1:{proxy.port}", gateway_settings.redis_url)
    settings = dataclasses.replace(gateway_settings, redis_url=behind)
    async with without_ports(settings, keys) as running:
        yield running
