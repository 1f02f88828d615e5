"""The misbehaving proxy, between redis-py and a real server: each fault does what it says, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from deploy.chaos.proxy import Way
from deploy.local.embedded import free_port
from shared.store.connections.redis_client import connect
from tests.mesh.running_mesh import wait
from tests.redis_proxy import Loss, RedisProxy

SOON_S = 60.0
"""Generous: the machine may be busy."""
A_MOMENT_S = 0.2
"""How long it is watched that something does not happen."""


@pytest.fixture
def proxy(redis_server: str) -> Iterator[RedisProxy]:
    with RedisProxy(redis_server) as proxy:
        yield proxy


@pytest.fixture
def direct(redis_server: str) -> Iterator[Redis]:
    with Redis.from_url(redis_server) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def client(proxy: RedisProxy, name: str = "") -> Redis:
    """One that repeats nothing and keeps to one connection, connected."""
    options: Any = {"client_name": name or None, "retry": Retry(NoBackoff(), 0), "single_connection_client": True}
    made = Redis.from_url(proxy.url, **options)
    made.ping()
    return made


def pinged(through: Redis) -> bool:
    return bool(through.ping())


def counts(direct: Redis, key: str) -> int:
    return int(direct.get(key) or 0)  # pyright: ignore[reportArgumentType]


def test_passes_everything_on_while_nobody_asks_for_a_fault(proxy: RedisProxy, key_prefix: str) -> None:
    with client(proxy) as through:
        through.set(key_prefix, b"x" * (3 << 20), px=60_000)
        assert b"x" * (3 << 20) == through.get(key_prefix)


def test_cuts_those_of_one_name_and_serves_their_new_connections(proxy: RedisProxy) -> None:
    with client(proxy, "executor-1") as one, client(proxy, "gateway-1") as other:
        assert ["executor-1", "gateway-1"] == proxy.names

        assert 1 == proxy.cut("executor")

        with pytest.raises(RedisConnectionError):
            one.ping()
        assert other.ping()
        assert one.ping()


def test_holds_and_releases_in_order(proxy: RedisProxy, pool: ThreadPoolExecutor, key_prefix: str) -> None:
    with client(proxy) as through:
        proxy.hold(way=Way.REPLIES)
        pushed: Future[object] = pool.submit(lambda: [through.rpush(key_prefix, n) for n in (1, 2)])
        with pytest.raises(NotYet):
            pushed.result(A_MOMENT_S)

        proxy.release()

        assert [1, 2] == pushed.result(SOON_S)
        through.delete(key_prefix)


def test_a_held_request_arrives_after_its_client_has_heard_of_the_loss(
    proxy: RedisProxy, direct: Redis, pool: ThreadPoolExecutor, key_prefix: str
) -> None:
    with client(proxy, "late") as through:
        proxy.hold("late", Way.REQUESTS)
        increased = pool.submit(through.incr, key_prefix)
        with pytest.raises(NotYet):
            increased.result(A_MOMENT_S)
        wait(lambda: proxy.waiting == 1, "the request has come as far as the proxy")

        assert 1 == proxy.hang_up("late")

        with pytest.raises(RedisConnectionError):
            increased.result(SOON_S)
        assert 0 == counts(direct, key_prefix)
        proxy.release()
        wait(lambda: counts(direct, key_prefix) == 1, "the held request arrives")
        direct.delete(key_prefix)


def test_delays_each_way(proxy: RedisProxy, pool: ThreadPoolExecutor) -> None:
    with client(proxy) as through:
        proxy.delay(3600.0, way=Way.REPLIES)
        ping = pool.submit(pinged, through)
        with pytest.raises(NotYet):
            ping.result(A_MOMENT_S)
        proxy.cut()
        with pytest.raises(RedisConnectionError):
            ping.result(SOON_S)

        proxy.delay(0.0, way=Way.REPLIES)

        assert through.ping()


def test_a_half_open_connection_hears_nothing_of_the_other_ends_death(
    proxy: RedisProxy, direct: Redis, pool: ThreadPoolExecutor
) -> None:
    with client(proxy, "stranded") as through, client(proxy, "other") as other:
        assert 1 == proxy.strand("stranded")
        ping = pool.submit(pinged, through)
        for shown in direct.client_list():
            if shown["name"] == "stranded":
                direct.client_kill_filter(_id=shown["id"])

        with pytest.raises(NotYet):
            ping.result(A_MOMENT_S)
        assert other.ping()

        proxy.heal()
        with pytest.raises(RedisConnectionError):
            ping.result(SOON_S)
        assert through.ping()


def test_refuses_one_name_until_it_is_admitted_again(proxy: RedisProxy) -> None:
    with client(proxy, "executor-1") as one, client(proxy, "gateway-1") as other:
        assert 1 == proxy.refuse("executor-1")

        for _ in range(2):
            with pytest.raises(RedisConnectionError):
                one.ping()
        assert other.ping()

        proxy.admit()
        assert one.ping()


@pytest.mark.parametrize(("loss", "carried_out"), [(Loss.UNSENT, 0), (Loss.PARTIAL, 0), (Loss.UNKNOWN, 1)])
def test_a_trap_loses_one_request_in_the_way_asked_for(
    proxy: RedisProxy, direct: Redis, key_prefix: str, loss: Loss, carried_out: int
) -> None:
    with client(proxy, "caught") as through:
        trap = proxy.trap(key_prefix.encode(), loss, of="caught")
        assert through.ping()
        with pytest.raises(RedisConnectionError):
            through.incr(key_prefix)

        assert 1 == trap.sprung
        wait(lambda: "caught" not in proxy.names, "the link is gone")
        assert carried_out == counts(direct, key_prefix)
        assert carried_out + 1 == through.incr(key_prefix)
        assert 1 == trap.sprung
        through.delete(key_prefix)


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    with RedisProxy(f"redis://127.0.0.1:{free_port()}") as proxy, pytest.raises(RedisConnectionError):
        client(proxy)


async def test_every_service_names_its_connections(proxy: RedisProxy) -> None:
    redis = connect(proxy.url, name="gateway of the \u00e9lite")
    await redis.ping()  # pyright: ignore[reportGeneralTypeIssues]

    assert ["gateway-of-the--lite"] == proxy.names
    await redis.aclose()
