"""Going over to another run of Redis, when that run is in trouble itself."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from gateway.requests.exchange.recovery import RestartRecovery
from gateway.requests.exchange.replies import Replies
from shared.contract.ids import GatewayId, ShardId
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.connections.homes import MESH_TAG, tag_of
from shared.store.connections.redis_client import connect
from shared.store.connections.server_run import AnotherRunError, ServerRun
from shared.store.keyspace import Keyspace
from tests.embedded_cluster import EmbeddedCluster

SHARD = ShardId(0)


class Callers:
    """In place of `Replies` and `Dispatch`. fails: times that Redis refuses a new reply stream, as `refusal` says."""

    def __init__(self, fails: int, refusal: str = "") -> None:
        self.fails = fails
        self.refusal = refusal
        self.asked = 0
        self.lost: list[ShardId] = []

    def __len__(self) -> int:
        return 1

    async def reopen(self, redis: Any, shards: Any, lost: set[ShardId]) -> None:
        if self.fails:
            # It is there when it is looked for again.
            lost.update([SHARD] if self.fails == 2 else [])
            self.fails -= 1
            raise ResponseError(self.refusal)

    async def ask_again(self, redis: Any, shards: Any, lost: Collection[ShardId]) -> None:
        self.asked += 1
        self.lost = list(lost)


class Uncut:
    """In place of a connection."""

    def cut(self) -> None:
        """Nobody uses it."""


@pytest.mark.parametrize(
    "refusal",
    ["command not allowed when used memory > 'maxmemory'.", "this user has no permissions to run the 'xadd' command"],
)
async def test_a_redis_that_refuses_when_it_comes_back_delays_the_recovery_and_does_not_end_it(
    redis_url: str, refusal: str
) -> None:
    run, callers = ServerRun(), Callers(fails=2, refusal=refusal)
    run.meet("the run before", Uncut())
    parts = cast("Any", callers)
    recovery = RestartRecovery(lambda new: connect(redis_url, run=new), Keyspace(), run, parts, parts)
    working = asyncio.create_task(recovery.run())
    with pytest.raises(AnotherRunError):
        run.meet("another", Uncut())

    async with asyncio.timeout(60):
        while run.changed.is_set():
            assert not working.done(), working.exception()
            await asyncio.sleep(0.005)
    working.cancel()

    assert (0, 1) == (callers.fails, callers.asked)
    assert [SHARD] == callers.lost, "what the first attempt found"
    assert run.bound[""] not in ("", "the run before", "another")


async def test_replies_are_heard_of_a_redis_that_has_lost_the_newest_and_whose_clock_is_behind(
    redis: Any, key_prefix: str
) -> None:
    """It gives them ids that lie before those that were read."""
    keys, gateway = Keyspace(key_prefix, 1), GatewayId("gateway-1")
    (stream,) = [keys.replies(shard, gateway) for shard in keys.shards]
    replies = Replies(redis, keys, gateway)
    heard: list[bytes] = []

    def answered(raw: bytes, _key: str) -> bool:
        heard.append(raw)
        return False

    pending: Any = SimpleNamespace(token="a", answered=answered)
    await replies.open(ServerRun())
    await redis.execute_command("XADD", stream, f"{1 << 60}-0", "nobody's", "lost later")
    reading = asyncio.create_task(replies.run())
    try:
        async with asyncio.timeout(30):
            while str(1 << 60).encode() not in b" ".join(replies._positions.values()):
                await asyncio.sleep(0.005)
            await redis.delete(stream)
            await redis.xadd(stream, {"nobody's": "as old as this"})
            await replies.reopen(redis, keys.shards, lost := set[ShardId]())
            assert not lost
            replies.expect(pending)
            await redis.xadd(stream, {"a": "the answer"})
            while not heard:
                await asyncio.sleep(0.005)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await replies.close()

    assert [b"the answer"] == heard


async def test_a_node_that_is_away_at_the_start_gets_no_request_before_it_has_the_reply_streams(
    private_cluster: EmbeddedCluster,
) -> None:
    """An answer is written to a stream that exists, or not at all."""
    run, gateway = ServerRun(), GatewayId("gateway-1")
    async with connect(private_cluster.url, retries=0) as redis:
        keys = await join_mesh(redis, "m")

    def open_client(run: ServerRun) -> Redis:
        return connect(private_cluster.url, retries=0, run=run, keys=keys)

    tags = [tag_of(keys.base(shard)) for shard in keys.shards]
    away = next(tag for tag in tags if private_cluster.holder(tag) is not private_cluster.holder(MESH_TAG))
    private_cluster.holder(away).kill()
    callers = cast("Any", Callers(fails=0))
    async with open_client(run) as redis:
        replies = Replies(redis, keys, gateway)
        await replies.open(run)
        await asyncio.to_thread(private_cluster.revive)
        with pytest.raises(AnotherRunError):
            await redis.at(away).ping()
        recovery = asyncio.create_task(RestartRecovery(open_client, keys, run, replies, callers).run())
        async with asyncio.timeout(60):
            while run.changed.is_set():
                await asyncio.sleep(0.005)
        recovery.cancel()

        streams = [keys.replies(shard, gateway) for shard in keys.shards]
        assert [1] * len(streams) == [await redis.exists(stream) for stream in streams]
        assert {stream.encode() for stream in streams} == replies._positions.keys()
        await replies.close()
