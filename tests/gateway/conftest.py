"""Fixtures: a gateway on the real server with a fake executor behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.settings import GatewaySettings, HttpParser
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running


@pytest.fixture
def keys(key_prefix: str) -> Keyspace:
    return Keyspace(key_prefix)


@pytest.fixture
def http_parser() -> HttpParser:
    """What reads HTTP in the test's gateways. Tests of HTTP override it, to run over each."""
    return "llhttp"


@pytest.fixture
def gateway_settings(redis_url: str, keys: Keyspace, http_parser: HttpParser) -> GatewaySettings:
    return GatewaySettings(
        redis_url=redis_url,
        key_prefix=keys.prefix,
        name="gateway",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        http_parser=http_parser,
    )


@pytest.fixture
async def executor(redis_url: str, keys: Keyspace) -> AsyncIterator[FakeExecutor]:
    """A fake executor that runs."""
    redis = connect(redis_url)
    fake = FakeExecutor(redis, keys)
    await fake.join()
    task = asyncio.create_task(fake.run())
    yield fake
    # A script that is on its way would make keys behind those that are removed here.
    resting = asyncio.create_task(fake.pause())
    await asyncio.wait([task, resting], return_when=asyncio.FIRST_COMPLETED)
    resting.cancel()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # What a live sequence leaves is the scheduler's to remove; there is none here.
    for pattern in ("seq:", "idle:", "parked:", "checkpoint:", "deadlines:", "owned:", "inbox:", "starts:", "feed:"):
        async for key in redis.scan_iter(match=f"{keys.prefix}:*{pattern}*"):
            await redis.unlink(key.decode())
    await redis.aclose()


@pytest.fixture
async def gateway(gateway_settings: GatewaySettings, executor: FakeExecutor) -> AsyncIterator[RunningGateway]:
    """A gateway before the fake executor."""
    async with gateway_running(gateway_settings) as running:
        yield running
