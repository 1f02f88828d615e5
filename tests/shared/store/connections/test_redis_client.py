"""Connections to a server that is silent, unfit, or not the one it was: each is heard of, and nothing goes astray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from deploy.chaos.proxy import Way
from shared.store.agreement import join_mesh
from shared.store.connections.link import Link
from shared.store.connections.redis_client import CONNECTIONS_MAX, connect
from shared.store.connections.redis_py import CONNECTION_LOST, UnfitServerError
from shared.store.connections.server_run import AnotherRunError, ServerRun
from shared.store.keyspace import DEFAULT_PREFIX
from tests.embedded_redis import EmbeddedRedis
from tests.redis_proxy import RedisProxy

SOON_S = 60


@pytest.fixture
async def run() -> ServerRun:
    return ServerRun()


@pytest.fixture
async def redis(private_server: EmbeddedRedis, run: ServerRun) -> AsyncIterator[Any]:
    redis = connect(private_server.url, retries=0, run=run)
    yield redis
    await redis.aclose()


# -- a silent one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_server: str) -> Iterator[RedisProxy]:
    with RedisProxy(redis_server) as proxy:
        yield proxy


async def test_a_connection_that_looks_alive_and_is_silent_counts_as_lost(proxy: RedisProxy) -> None:
    redis: Any = connect(proxy.url, retries=0, timeout_ms=SOON_S * 1000)
    link: Any = Link(redis)
    await redis.ping()
    await link.connect()
    for connection in (link._connection, *redis.connection_pool._available_connections):
        connection.reply_timeout_s = 0.1

    assert 2 == proxy.strand()

    with pytest.raises(RedisTimeoutError):
        await link.exchange([("PING",)])
    with pytest.raises(RedisTimeoutError):
        await redis.ping()
    await link.connect()
    assert [b"PONG"] == await link.exchange([("PING",)])
    assert await redis.ping()
    await link.close()
    await redis.aclose()


async def test_a_server_that_takes_connections_and_is_silent_counts_as_lost(proxy: RedisProxy) -> None:
    proxy.hold(way=Way.REPLIES)
    redis: Any = connect(proxy.url, retries=0, timeout_ms=100)

    with pytest.raises(CONNECTION_LOST):
        await Link(redis).connect()
    with pytest.raises(CONNECTION_LOST):
        await redis.ping()
    await redis.aclose()


async def test_a_blocking_read_may_take_its_own_time_on_top(private_server: EmbeddedRedis) -> None:
    redis: Any = connect(private_server.url, retries=0, timeout_ms=SOON_S * 1000)
    link: Any = Link(redis)
    await link.connect()
    link._connection.reply_timeout_s = 0.1

    assert [None] == await link.exchange([("BLPOP", "empty", 0.3)], blocking_s=SOON_S)

    await link.close()
    await redis.aclose()


# -- one that was cut --------------------------------------------------------------------------------------------------


async def test_more_commands_than_connections_wait_for_each_other(private_server: EmbeddedRedis) -> None:
    """A process that serves hundreds of models asks Redis for each of them at once."""
    async with cast("Any", connect(private_server.url, retries=0, name="many-models")) as client:
        await asyncio.gather(*(client.incr("asked") for _ in range(20 * CONNECTIONS_MAX)))

        assert b"%d" % (20 * CONNECTIONS_MAX) == await client.get("asked")
        mine = [one for one in await client.client_list() if one["name"] == "many-models"]
        assert len(mine) <= CONNECTIONS_MAX


async def test_a_link_that_was_cut_while_idle_is_made_anew_before_it_is_used(proxy: RedisProxy) -> None:
    """Also the next time: whoever connects has sent nothing, and may send anything."""
    link: Any = Link(connect(proxy.url, retries=0))
    for _ in range(2):
        await link.connect()
        assert [b"PONG"] == await link.exchange([("PING",)])
        assert proxy.hang_up()
        async with asyncio.timeout(SOON_S):
            while not link._connection._reader.at_eof():
                await asyncio.sleep(0.005)

    await link.connect()
    assert [b"PONG"] == await link.exchange([("PING",)])
    await link.close()


# -- an unfit one ------------------------------------------------------------------------------------------------------


async def test_a_primary_that_is_demoted_counts_as_a_lost_connection(
    private_server: EmbeddedRedis, server: Any
) -> None:
    redis: Any = connect(private_server.url, retries=0)
    link = Link(redis)
    await link.connect()
    server.xadd("stream", {"a": "b"})
    reading = asyncio.create_task(link.exchange([("XREAD", "BLOCK", 0, "STREAMS", "stream", "$")], blocking_s=SOON_S))
    while not any("xread" in shown["cmd"] for shown in server.client_list()):
        await asyncio.sleep(0.01)

    server.replicaof("127.0.0.1", 1)

    ((unblocked,), refused) = await reading, await refusal(redis.set("a", "b"))
    assert ["UNBLOCKED", "You can't write"] == [str(unblocked)[:9], str(refused)[:15]]
    assert isinstance(unblocked, UnfitServerError)
    await link.connect()
    (first, second) = await link.exchange([("SET", "a", "b"), ("PING",)])
    assert isinstance(first, UnfitServerError)
    assert b"PONG" == second

    server.replicaof("NO", "ONE")
    await link.connect()
    assert [b"OK"] == await link.exchange([("SET", "a", "b")])
    assert await redis.get("a") == b"b"
    await link.close()
    await redis.aclose()


async def test_a_server_that_may_not_write_counts_as_a_lost_connection(redis: Any, server: Any) -> None:
    server.config_set("min-replicas-to-write", 1)

    assert "NOREPLICAS" in str(await refusal(redis.set("a", "b")))

    server.config_set("min-replicas-to-write", 0)
    assert await redis.set("a", "b")


async def refusal(call: Any) -> UnfitServerError:
    with pytest.raises(UnfitServerError) as caught:
        await call
    return caught.value


# -- another one -------------------------------------------------------------------------------------------------------


async def test_nothing_is_sent_to_a_restarted_server_before_it_is_agreed_to(
    redis: Any, run: ServerRun, private_server: EmbeddedRedis
) -> None:
    link = Link(redis)
    await link.connect()
    assert await redis.incr("counted") == 1
    private_server.stop()
    private_server.start()

    with contextlib.suppress(AnotherRunError):
        # The end of the old connection may not have been seen yet: then it is used, and fails.
        await link.connect()
        with pytest.raises(CONNECTION_LOST):
            await link.exchange([("INCR", "counted")])
    with pytest.raises(AnotherRunError):
        await link.connect()
    with pytest.raises(AnotherRunError):
        await redis.incr("counted")
    assert run.changed.is_set()
    free: Any = connect(private_server.url, retries=0)
    assert await free.get("counted") == b"1"

    run.agree(run.met)

    assert await redis.incr("counted") == 2
    await link.connect()
    assert [b"2"] == await link.exchange([("GET", "counted")])
    await link.close()
    await free.aclose()


async def test_nothing_is_sent_to_a_server_that_was_a_replica_in_between_before_it_is_agreed_to(
    redis: Any, run: ServerRun, server: Any
) -> None:
    """Its process is the same: what it holds may be what another server had."""
    assert await redis.incr("counted") == 1
    server.replicaof("127.0.0.1", 1)
    server.replicaof("NO", "ONE")
    await redis.connection_pool.disconnect()

    with pytest.raises(AnotherRunError):
        await redis.incr("counted")

    run.agree(run.met)
    assert await redis.incr("counted") == 2


async def test_connections_of_one_run_are_made_whenever_they_are_needed(redis: Any, run: ServerRun) -> None:
    for _ in range(3):
        assert await redis.ping()
        await redis.connection_pool.disconnect()

    assert not run.changed.is_set()
    assert run.bound == run.met
    assert run.bound[""]


async def test_a_server_that_does_not_tell_its_run_is_taken_as_it_is_and_the_operator_told(
    run: ServerRun, private_server: EmbeddedRedis, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.acl_setuser("quiet", enabled=True, passwords=["+secret"], categories=["+@all"], commands=["-info"], keys="*")
    url = f"redis://quiet:secret@{private_server.address}/0"
    redis = connect(url, retries=0, run=run)

    assert await redis.ping()

    assert ({"": ""}, False) == (run.bound, run.changed.is_set())

    await join_mesh(redis, DEFAULT_PREFIX)

    (told,) = [record for record in caplog.records if record.message == "redis does not tell who it is"]
    assert "+info" in str(vars(told))
    await redis.aclose()


async def test_a_service_agrees_to_the_runs_of_a_clusters_homes_one_by_one(run: ServerRun) -> None:
    connections = [Connection(), Connection()]
    for home, connection in zip("01", connections, strict=True):
        run.meet("before", connection, home)

    for home in "01":
        with pytest.raises(AnotherRunError):
            run.meet("after", Connection(), home)
    run.agree({"0": "after"})

    assert [True, True] == [connection.is_cut for connection in connections]
    assert ({"1"}, True) == (run.others, run.changed.is_set())
    # Those who name the server may disagree for a while.
    run.meet("before", kept := Connection(), "1")
    assert run.changed.is_set()
    run.agree({"1": "before"})
    assert (set(), False, False) == (run.others, run.changed.is_set(), kept.is_cut)


class Connection:
    """In place of one that is bound to a run."""

    is_cut = False

    def cut(self) -> None:
        self.is_cut = True
