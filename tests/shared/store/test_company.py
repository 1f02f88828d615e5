"""Services of one mesh hear of each other's releases."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import msgspec
import pytest

from deploy.operate.drain import mixture
from shared.store import company, reading
from shared.store.company import FORGET_AFTER_MS, Company, ServiceLine, call_addresses, services
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.release import FORMAT, RELEASE

NEWER = ServiceLine("executor", "executor-1", "9.9.9", "1.99", 0)


@pytest.fixture
def keys(key_prefix: str) -> Keyspace:
    return Keyspace(key_prefix)


async def tell_of(redis: Any, keys: Keyspace, *, id: str = "other", age_ms: int = 0) -> None:
    """Another service's word."""
    seconds, _ = await redis.time()
    line = msgspec.structs.replace(NEWER, told_ms=seconds * 1000 - age_ms)
    await redis.hset(keys.services, id, msgspec.json.encode(line))


async def test_a_mixture_is_logged_when_it_comes_and_shown_to_operators(
    redis: Any, keys: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    company = Company(redis, keys, "gateway", "gateway-1")
    with caplog.at_level(logging.WARNING, "seqmesh"):
        company.hear(await company.tell())
        assert "" == mixture(await services(redis, keys))
        assert not caplog.records

        await tell_of(redis, keys)
        await tell_of(redis, keys, id="namesake")
        for _ in range(3):
            company.hear(await company.tell())

    (line,) = caplog.records
    fields: dict[str, Any] = vars(line)["fields"]
    assert ("executor", "9.9.9", "1.99", FORMAT) == tuple(
        fields[name] for name in ("service", "release", "format", "own_format")
    )
    shown = f"release 9.9.9, format 1.99: executor-1, executor-1\nrelease {RELEASE}, format {FORMAT}: gateway-1\n"
    assert shown == mixture(await services(redis, keys))


async def test_a_gateway_tells_where_it_takes_calls_at_once(
    redis: Any, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would tell nothing else for ten minutes here, and does not."""
    monkeypatch.setattr(company, "TELL_EVERY_S", 600.0)
    gateway = Company(redis, keys, "gateway", "gateway-1")
    telling = asyncio.create_task(gateway.run())
    try:
        for address in ("grpc://10.0.0.1:8001", ""):
            gateway.takes_calls(address)
            async with asyncio.timeout(60):
                while [address] != [line.grpc for line in await services(redis, keys)]:
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            told = -1
            while told != (told := (await services(redis, keys))[0].told_ms):
                for _ in range(50):
                    await redis.ping()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_who_is_silent_or_unreadable_is_forgotten(
    redis: Any, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "found", reading.Found())
    await tell_of(redis, keys, age_ms=FORGET_AFTER_MS + 1000)
    await tell_of(redis, keys, id="future", age_ms=-1 << 60)
    for id, data in (("a", b"\xff"), ("b", b"{}"), ("c", b'{"service": "' + b"x" * 1000), (b"\xfe", b"[]")):
        await redis.hset(keys.services, id, data)

    (line,) = await Company(redis, keys, "gateway", "gateway-1").tell()

    assert ("gateway", "gateway-1", RELEASE, FORMAT) == (line.service, line.name, line.release, line.format)
    assert 1 == await redis.hlen(keys.services)
    assert {"services": 4} == reading.found.counts


async def test_who_was_frozen_while_it_told_of_itself_takes_nobody_for_gone(
    redis: Any, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before_the_freeze(redis: Any) -> int:
        return await redis_now_ms(redis) - 2 * FORGET_AFTER_MS

    monkeypatch.setattr(company, "redis_now_ms", before_the_freeze)
    await tell_of(redis, keys)

    (line,) = await Company(redis, keys, "gateway", "gateway-1").tell()

    assert NEWER.name == line.name
    assert await redis.hexists(keys.services, "other")


async def test_who_leaves_takes_its_word_back(redis: Any, keys: Keyspace) -> None:
    running = asyncio.create_task(Company(redis, keys, "scheduler", "scheduler-1").run())
    async with asyncio.timeout(60):
        while not await redis.hlen(keys.services):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert 0 == await redis.hlen(keys.services)


async def test_a_service_whose_mesh_has_another_number_of_shards_now_ends(redis: Any, keys: Keyspace) -> None:
    """It slept while the keys were moved; or Redis lost everything, and a process that came later began anew."""
    company = Company(redis, keys, "gateway", "gateway-1")
    await company.tell()
    await redis.hset(keys.mesh, "shards", "garbage")
    await company.tell()
    assert str(len(keys.shards)).encode() == await redis.hget(keys.mesh, "shards")

    for shards in (0, len(keys.shards) + 1, "0,2,"):
        await redis.hset(keys.mesh, "shards", shards)
        with pytest.raises(UnfitRedisError):
            await company.run()


def test_calls_go_first_to_a_gateway_on_this_machine_and_never_to_another_ones_loopback() -> None:
    here = socket.gethostname()

    def gateway(host: str, address: str) -> ServiceLine:
        return msgspec.structs.replace(NEWER, service="gateway", host=host, grpc=address)

    lines = [gateway("there", f"grpc://there:{port}") for port in range(8)]
    lines += [NEWER, gateway("there", "grpc://127.0.0.1:1"), gateway(here, "grpc://127.0.0.1:2")]

    for _ in range(20):
        first, *others = call_addresses(lines)
        assert "grpc://127.0.0.1:2" == first
        assert {f"grpc://there:{port}" for port in range(8)} == set(others)
