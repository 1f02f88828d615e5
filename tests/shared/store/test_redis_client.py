"""Connections to a server that is silent, unfit, or not the one it was: each is heard of, and nothing goes astray."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import pytest
from redis import Redis as SyncRedis
from redis.exceptions import TimeoutError as RedisTimeoutError

from deploy.chaos.proxy import Way
from shared.contract.ids import ShardId, first_shards
from shared.process.lifecycle import Stop, Tasks, serve_until_stopped
from shared.store import redis_client
from shared.store.keyspace import DEFAULT_PREFIX, SCHEMA_VERSION, Keyspace
from shared.store.link import Link
from shared.store.redis_client import (
    CONNECTION_LOST,
    CONNECTIONS_MAX,
    UnfitRedisError,
    connect,
    join_mesh,
    joined,
    keys_of_mesh,
)
from shared.store.redis_py import UnfitServerError
from shared.store.server_run import AnotherRunError, ServerRun
from tests.embedded_redis import EmbeddedRedis
from tests.redis_proxy import RedisProxy

SOON_S = 60


@pytest.fixture
def server(private_server: EmbeddedRedis) -> Iterator[Any]:
    """A client for what is done to the server."""
    with SyncRedis.from_url(private_server.url) as client:
        yield client


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
    url = f"redis://quiet:secret@{private_server.host}:{private_server.port}/0"
    redis = connect(url, retries=0, run=run)

    assert await redis.ping()

    assert ({"": ""}, False) == (run.bound, run.changed.is_set())

    await join_mesh(redis, DEFAULT_PREFIX)

    (told,) = [record for record in caplog.records if record.message == "redis does not tell who it is"]
    assert "+info" in str(vars(told))
    await redis.aclose()


# -- at the start ------------------------------------------------------------------------------------------------------


async def test_a_server_that_cannot_hold_a_mesh_is_refused_with_the_remedy(redis: Any, server: Any) -> None:
    await join_mesh(redis, DEFAULT_PREFIX)

    for option, value, told in [
        ("maxmemory-policy", "allkeys-lru", "set it to noeviction"),
        ("maxmemory-policy", "volatile-ttl", "set it to noeviction"),
    ]:
        server.config_set(option, value)
        with pytest.raises(UnfitRedisError, match=told):
            await join_mesh(redis, DEFAULT_PREFIX)
        server.config_set(option, "noeviction")
    keys = Keyspace()
    for schema, told in (
        (
            SCHEMA_VERSION + 1,
            f"is of schema {SCHEMA_VERSION + 1}, but release .* speaks {SCHEMA_VERSION}: start a newer release, ",
        ),
        (SCHEMA_VERSION - 1, f"stop its services, which are older, and remove the key '{keys.mesh}', "),
    ):
        await redis.hset(keys.mesh, "schema", schema)
        with pytest.raises(UnfitRedisError, match=f"{told}or give `seqmesh up` another --data-dir, or use another"):
            await join_mesh(redis, keys.prefix)
    await redis.hset(keys.mesh, mapping={"schema": "garbage", "shards": b"\xff"})
    await join_mesh(redis, keys.prefix, 3)
    assert {b"schema": b"%d" % SCHEMA_VERSION, b"shards": b"3"} == await redis.hgetall(keys.mesh)

    server.replicaof("127.0.0.1", 1)
    with pytest.raises(UnfitRedisError, match=r"read-only replica of 127.0.0.1:1: give the primary's address"):
        await join_mesh(redis, DEFAULT_PREFIX)


async def test_the_number_of_shards_that_redis_holds_wins_and_only_another_explicit_one_is_refused(redis: Any) -> None:
    new, old = Keyspace("new"), Keyspace("old", 4)
    await redis.hset(old.mesh, "shards", 4)

    assert [1, 1, 4, 4] == [
        len((await join_mesh(redis, prefix, shards)).shards)
        for prefix, shards in (("new", 0), ("new", 1), ("old", 0), ("old", 4))
    ]
    assert b"1" == await redis.hget(new.mesh, "shards")
    for prefix, shards, told in (("new", 4, "has 1 shards, but .* with 4: leave"), ("old", 1, "`seqmesh reshard 1`")):
        with pytest.raises(UnfitRedisError, match=told):
            await join_mesh(redis, prefix, shards)


@pytest.mark.parametrize("shards", [-1, 1025, 2**53, "", "a", "1,1,", "1,-2,", ","])
async def test_a_number_of_shards_that_no_mesh_has_is_unreadable_and_nobody_takes_it(
    redis: Any, shards: int | str
) -> None:
    """Whoever knows the number fixes it again."""
    await redis.hset(Keyspace().mesh, "shards", shards)

    with pytest.raises(UnfitRedisError, match="does not say its number of shards any more"):
        await join_mesh(redis, DEFAULT_PREFIX, 0)
    with pytest.raises(UnfitRedisError, match="cannot be read"):
        await keys_of_mesh(redis, DEFAULT_PREFIX)
    assert first_shards(4) == (await join_mesh(redis, DEFAULT_PREFIX, 4)).shards


async def test_a_mesh_on_its_way_to_another_number_of_shards_is_joined_by_nobody(redis: Any) -> None:
    await redis.hset(Keyspace().mesh, "shards", 0)

    for shards in (0, 1, 4):
        with pytest.raises(UnfitRedisError, match="once more if it was cut off"):
            await join_mesh(redis, DEFAULT_PREFIX, shards)
    with pytest.raises(UnfitRedisError, match="once more if it was cut off"):
        await keys_of_mesh(redis, DEFAULT_PREFIX)


@pytest.mark.parametrize(
    ("login", "told"),
    [
        ("quiet:hunter2@", "refuses the user of SEQMESH_REDIS_URL, or its password: invalid"),
        ("unknown:hunter2@", "refuses the user of SEQMESH_REDIS_URL, or its password: invalid"),
        ("quiet:secret@", "refuses the user of SEQMESH_REDIS_URL, or its password: .*has no permissions"),
        ("", "refuses the user of SEQMESH_REDIS_URL, or its password: Authentication required"),
        ("full:secret@", "is full: raise its maxmemory, or let sequences end: "),
        ("full:secret@/99", "refuses a command: DB index is out of range"),
        ("gone", r"cannot be reached \(--redis-url names another\): Error 111"),
    ],
)
async def test_a_service_that_redis_does_not_let_in_says_what_to_change_without_a_traceback_and_without_the_password(
    private_server: EmbeddedRedis,
    server: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    login: str,
    told: str,
) -> None:
    monkeypatch.setattr(redis_client, "BACKOFF_CAP_S", 0.001)
    server.acl_setuser("quiet", enabled=True, passwords=["+secret"], categories=["+@connection"])
    server.acl_setuser("full", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all"])
    if login.startswith("full"):
        server.config_set("maxmemory", 1)
    server.acl_setuser("default", enabled=False)
    user, _, database = login.replace("gone", ":hunter2@").partition("/")
    url = f"redis://{user}127.0.0.1:{private_server.port}/{database or 0}"
    if login == "gone":
        private_server.stop()

    async def serve(tasks: Tasks, stop: Stop) -> None:
        async with joined(url, DEFAULT_PREFIX, 0, name="a"):
            pass

    assert 1 == await serve_until_stopped(serve)

    (line,) = [record for record in caplog.records if record.message == "service failed"]
    assert re.search(told, line.__dict__["fields"]["cause"])
    assert line.exc_info is None
    assert "hunter2" not in str(vars(line))
    assert "secret" not in str(vars(line))


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"redis_version": "6.2.14"}, "Redis 6.2.14 is too old"),
        ({"redis_version": "7.2.4", "cluster_enabled": 1}, "runs as a Cluster"),
        ({"redis_version": "7.2.4", "redis_mode": "sentinel"}, r"a Sentinel and no server: .*redis\+sentinel://"),
    ],
)
def test_a_server_of_the_wrong_kind_is_refused(info: dict[str, Any], told: str) -> None:
    with pytest.raises(UnfitRedisError, match=told):
        redis_client.check_server_info(info)


@pytest.mark.parametrize(
    ("config", "replicas", "told"),
    [
        ({"appendonly": "yes", "appendfsync": "everysec"}, 0, []),
        ({"appendonly": "yes", "appendfsync": "always"}, 0, []),
        ({"appendonly": "yes", "appendfsync": "no"}, 0, ["redis hardly durable"]),
        ({"appendonly": "no", "save": "3600 1"}, 0, ["redis not durable"]),
        ({"appendonly": "no", "save": ""}, 0, ["redis not durable"]),
        ({"appendonly": "yes"}, 1, ["redis fails over with losses"]),
        ({"appendonly": "yes", "min-replicas-to-write": "1"}, 1, []),
        ({"appendonly": "yes", "cluster-enabled": "no", "cluster-require-full-coverage": "yes"}, 0, []),
        ({"appendonly": "yes", "cluster-enabled": "yes", "cluster-require-full-coverage": "no"}, 0, []),
        (
            {"appendonly": "yes", "cluster-enabled": "yes", "cluster-require-full-coverage": "yes"},
            0,
            ["redis stops with any of its nodes"],
        ),
    ],
)
def test_what_a_server_would_lose_is_told(config: dict[str, str], replicas: int, told: list[str]) -> None:
    assert told == [event for event, _ in redis_client.risks(config, replicas=replicas)]


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
    run.meet("before", Connection(), "1")
    assert run.changed.is_set()
    run.agree({"1": "before"})
    assert (set(), False) == (run.others, run.changed.is_set())


class Connection:
    """In place of one that is bound to a run."""

    is_cut = False

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2), (3,), (0, 1, 3), (17, 4)])
def test_the_shards_of_a_mesh_are_read_as_they_were_told(numbers: Sequence[int]) -> None:
    shards = tuple(map(ShardId, numbers))

    assert shards == redis_client.shards_told(redis_client.told(shards).encode())
