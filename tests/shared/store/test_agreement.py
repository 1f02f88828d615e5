"""What the processes of a mesh agree on, and who is not let in."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.exceptions import ResponseError

from shared.contract.ids import ShardId, first_shards
from shared.process.lifecycle import Stop, Tasks, end, serve_until_stopped
from shared.store import agreement
from shared.store.agreement import agree, join_mesh, joined, keys_of_mesh
from shared.store.commands import Redis
from shared.store.connections import redis_client
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import UnfitServerError
from shared.store.keyspace import DEFAULT_PREFIX, SCHEMA_VERSION, Keyspace
from tests.embedded_redis import EmbeddedRedis


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Any]:
    redis = connect(private_server.url, retries=0)
    yield redis
    await redis.aclose()


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


@pytest.mark.parametrize("schema", [-1, 0, 2**63, "9" * 400, "", "7.5"])
async def test_a_schema_that_no_release_has_is_unreadable_and_ends_no_service(redis: Any, schema: int | str) -> None:
    """Every service looks at it, every few seconds; whoever has joined fixes it again."""
    keys = await join_mesh(redis, DEFAULT_PREFIX)
    await redis.hset(keys.mesh, "schema", schema)

    with pytest.raises(UnfitRedisError, match="cannot be read"):
        await keys_of_mesh(redis, DEFAULT_PREFIX)
    assert keys.shards == (await agree(redis, DEFAULT_PREFIX, known=keys.shards)).shards
    assert b"%d" % SCHEMA_VERSION == await redis.hget(keys.mesh, "schema")


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


async def is_busy(redis: Redis) -> bool:
    """Whether the server refuses commands because a script runs."""
    try:
        return not await redis.ping()
    except UnfitServerError:
        return True


async def test_a_service_waits_for_a_redis_that_says_that_it_cannot_serve_yet(
    private_server: EmbeddedRedis, server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "BACKOFF_CAP_S", 0.001)
    monkeypatch.setattr(agreement, "NOT_SERVING_PAUSE_S", 0.001)
    server.config_set("busy-reply-threshold", 1)

    async def join() -> Keyspace:
        async with joined(private_server.url, DEFAULT_PREFIX, 0, name="a") as (_, keys):
            return keys

    # However long the script runs, its caller waits for the answer.
    async with connect(private_server.url, retries=0, timeout_ms=600_000) as redis:
        busy = asyncio.create_task(redis.eval("while true do end", 0))
        async with asyncio.timeout(60):
            while not await is_busy(redis):
                await asyncio.sleep(0.01)
        joining = asyncio.create_task(join())
        async with asyncio.timeout(60):
            while "waiting for redis" not in caplog.text:
                await asyncio.sleep(0.01)
        assert not joining.done()
        server.script_kill()
        with pytest.raises(ResponseError):
            await busy

        assert first_shards(1) == (await joining).shards


async def test_a_service_says_that_it_waits_for_a_redis_that_takes_connections_and_is_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "SILENCE_TOLD_AFTER_S", 0.001)

    async def join(url: str) -> None:
        async with joined(url, DEFAULT_PREFIX, 0, name="a"):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        joining = asyncio.create_task(join(f"redis://127.0.0.1:{listener.getsockname()[1]}"))
        async with asyncio.timeout(60):
            while "waiting for redis" not in caplog.text:
                await asyncio.sleep(0.01)
        assert not joining.done()
        await end([joining])


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2), (3,), (0, 1, 3), (17, 4)])
def test_the_shards_of_a_mesh_are_read_as_they_were_told(numbers: Sequence[int]) -> None:
    shards = tuple(map(ShardId, numbers))

    assert shards == agreement.shards_told(agreement.told(shards).encode())
