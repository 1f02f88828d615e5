"""The read that brings the replies leaves the event loop to others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import NoPermissionError

from gateway.ports.turns import LoopTurns
from gateway.requests.exchange.replies import DELIVERED_AT_ONCE, ENTRY_BYTES, Replies
from shared.contract.ids import GatewayId, ShardId
from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis

MANY = 20 * DELIVERED_AT_ONCE
SOON_S = 60.0


async def test_thousands_of_replies_in_one_entry_are_handed_out_in_their_order_and_in_many_turns(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decoupled model writes them, whose answers are small."""
    keys, gateway = Keyspace(key_prefix), GatewayId("g")
    replies, turns = Replies(redis, keys, gateway), LoopTurns()
    handed: list[str] = []
    in_turn = Counter[int]()

    def noted(token: str, raw: bytes, key: str) -> None:
        del raw, key
        handed.append(token)
        in_turn[turns.number] += 1

    monkeypatch.setattr(replies, "deliver", noted)
    await replies.open(ServerRun())
    await cast("Any", redis).xadd(keys.replies(ShardId(0), gateway), {str(number): "" for number in range(MANY)})
    reading = asyncio.create_task(replies.run())
    async with asyncio.timeout(SOON_S):
        while len(handed) < MANY:
            await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await replies.close()

    assert list(map(str, range(MANY))) == handed
    # Two turns, one after the other, may be counted as one.
    assert 2 * DELIVERED_AT_ONCE >= max(in_turn.values())


async def test_replies_come_again_when_what_redis_has_refused_for_a_while_is_allowed(
    private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator changes what the user of the gateways may do: none of them ends for that."""
    monkeypatch.setattr("gateway.requests.exchange.replies.READ_BLOCK_MS", 10)
    keys, gateway, redis = Keyspace("p"), GatewayId("g"), connect(private_server.url)
    server, refused, exchange = cast("Any", redis), asyncio.Event(), Link.exchange

    async def noted(self: Link, commands: Sequence[Sequence[Any]], **given: Any) -> Any:
        outcomes = await exchange(self, commands, **given)
        if isinstance(outcomes[-1], NoPermissionError):
            refused.set()
        return outcomes

    monkeypatch.setattr(Link, "exchange", noted)
    replies, handed = Replies(redis, keys, gateway), asyncio.Queue[str]()

    def handed_out(token: str, *_: object) -> None:
        handed.put_nowait(token)

    monkeypatch.setattr(replies, "deliver", handed_out)
    await replies.open(ServerRun())
    reading, told = asyncio.create_task(replies.run()), asyncio.create_task(handed.get())
    async with asyncio.timeout(SOON_S):
        await server.execute_command("ACL", "SETUSER", "default", "-xread")
        await refused.wait()
        await server.execute_command("ACL", "SETUSER", "default", "+xread")
        await server.xadd(keys.replies(ShardId(0), gateway), {"token": ""})
        await asyncio.wait([reading, told], return_when=asyncio.FIRST_COMPLETED)
    reading.cancel()
    await asyncio.wait([reading])
    await redis.aclose()

    assert told.done()
    assert told.result() == "token"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many entries each read has asked; one may bring 3 MiB, and none ends without entries: the next one would
    ask for as many as ever."""
    found, exchange = list[int](), Link.exchange

    async def noted(self: Link, commands: Sequence[Sequence[Any]], **given: Any) -> Any:
        found.append(commands[-1][2])
        return await exchange(self, commands, **given)

    monkeypatch.setattr(Link, "exchange", noted)
    monkeypatch.setattr("gateway.requests.exchange.replies.READ_BYTES", 3 << 20)
    monkeypatch.setattr("gateway.requests.exchange.replies.READ_BLOCK_MS", 600_000)
    return found


async def test_a_read_brings_fewer_entries_where_they_are_large(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    """So the replies that gather in Redis while this process is busy do not all come into its memory at once."""
    keys, gateway = Keyspace(key_prefix), GatewayId("g")
    replies, handed = Replies(redis, keys, gateway), list[str]()

    def handed_out(token: str, *_: object) -> None:
        handed.append(token)

    monkeypatch.setattr(replies, "deliver", handed_out)
    await replies.open(ServerRun())
    numbers = [str(number) for number in range(20)]
    for number in numbers:
        await cast("Any", redis).xadd(keys.replies(ShardId(0), gateway), {number: bytes(1 << 20)})
    monkeypatch.setattr(replies, "_entries_max", {keys.replies(ShardId(0), gateway).encode(): 4})
    reading = asyncio.create_task(replies.run())
    async with asyncio.timeout(SOON_S):
        while len(handed) < len(numbers):
            await asyncio.sleep(0)
        await cast("Any", redis).xadd(keys.replies(ShardId(0), gateway), {"small": b""})
        while handed[-1] != "small":
            await asyncio.sleep(0)
        while asked[-1] == 2:
            await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await replies.close()

    assert [*numbers, "small"] == handed
    assert [4, *[2] * 9] == asked[:10]
    assert asked[-1] == (3 << 20) // (ENTRY_BYTES + len("small"))


async def test_what_one_server_has_brought_says_nothing_of_the_next_read_of_another(
    redis: Redis, key_prefix: str, asked: list[int]
) -> None:
    keys, gateway = Keyspace(key_prefix, 2), GatewayId("g")
    replies = Replies(redis, keys, gateway)
    await replies.open(ServerRun())
    large, small = (keys.replies(shard, gateway) for shard in keys.shards)
    link = Link(redis)
    await link.connect()
    for stream, size in ((large, 1 << 20), (small, 1), (large, 1 << 20)):
        await cast("Any", redis).xadd(stream, {"token": bytes(size)})
        await replies._read(link, [stream.encode()])
    await link.close()
    await replies.close()

    assert asked == [256, 256, 2]
