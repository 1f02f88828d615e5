"""The twin against the real server: the same commands, the same replies.

The mesh's scripts run on both in the tests that `tests/conftest.py` lists as the store's contract; here it is plain
commands, in any order and with every type of key, and what crosses the border between Lua and the store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.libraries import LIBRARIES
from tests.simulation.connections import Server, direct_client, loop_timer
from tests.simulation.refusing import GROWING, WRITING
from tests.simulation.store import COMMANDS, Store

COMMANDS_PER_SEED = 1000
TTL_MS = 600_000

Command = list[Any]


class Pair:
    """Both stores behind the same kind of connection. Entry ids, which are times, are compared by their order."""

    def __init__(self, server: Redis, twin: Redis) -> None:
        self._links = (Link(server), Link(twin))
        self._ids: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})

    async def same(self, commands: list[Command]) -> list[Any]:
        """Sends the commands to both; returns the replies, which are equal."""
        replies: list[list[Any]] = []
        for link, ids in zip(self._links, self._ids, strict=True):
            await link.connect()
            known = {number: entry for entry, number in ids.items()}
            sent = [
                [known.get(part.number, b"0-0") if isinstance(part, EntryOf) else part for part in c] for c in commands
            ]
            replies.append([_plain(reply, ids) for reply in await link.exchange(sent)])
        for command, on_server, on_twin in zip(commands, *replies, strict=True):
            assert on_server == on_twin, command
        return replies[0]

    async def close(self) -> None:
        for link in self._links:
            await link.close()


class EntryOf:
    """An entry id, by the order in which it was seen."""

    def __init__(self, number: int) -> None:
        self.number = number


def _plain(reply: Any, ids: dict[bytes, int]) -> Any:
    """A reply that can be compared: of an error its code, of an entry id its number, of a TTL that there is one."""
    if isinstance(reply, ResponseError):
        word = str(reply).split()[0]
        return f"error {type(reply).__name__} {word if word.isupper() else ''}"
    if isinstance(reply, list):
        return [_plain(item, ids) for item in cast("list[Any]", reply)]
    if isinstance(reply, bytes) and len(reply) > 14 and reply.replace(b"-", b"").isdigit():
        return f"entry {ids.setdefault(reply, len(ids))}"
    if isinstance(reply, int) and TTL_MS - 60_000 < reply <= TTL_MS:
        return "a TTL"
    return reply


@pytest.fixture
async def pair(redis_url: str, twin: Store) -> Any:
    server = connect(redis_url, retries=0)
    pair = Pair(server, direct_client(Server(twin, loop_timer)))
    yield pair
    await pair.close()
    await server.aclose()


def random_commands(chance: random.Random, prefix: str) -> list[Command]:
    """Commands on a few keys of each type, now and then on one of another type."""
    kinds = ("string", "hash", "set", "zset", "list")
    fields = ["a", "b", "c", "d", "7"]

    def key(kind: str) -> str:
        return f"{prefix}:{kind if chance.random() < 0.97 else chance.choice(kinds)}:{chance.randrange(3)}"

    # One stream, which is never removed: two of them may hold the same entry id, on one store and not on the other.
    stream = f"{prefix}:stream"

    def field() -> str:
        return chance.choice(fields)

    def number() -> int:
        return chance.randint(-3, 4)

    def entry() -> EntryOf:
        return EntryOf(chance.randrange(60))

    makers: list[Callable[[], Command]] = [
        lambda: ["SET", key("string"), number()],
        lambda: ["SET", key("string"), field(), "PX", TTL_MS],
        lambda: ["SET", key("string"), field(), chance.choice(["NX", "XX"])],
        lambda: ["GET", key("string")],
        lambda: ["MGET", key("string"), key("string"), key("hash")],
        lambda: [chance.choice(["INCR", "DECR"]), key("string")],
        lambda: ["INCRBY", key("string"), number()],
        lambda: ["HSET", key("hash"), field(), number(), field(), field()],
        lambda: ["HSETNX", key("hash"), field(), number()],
        lambda: ["HGET", key("hash"), field()],
        lambda: ["HMGET", key("hash"), *fields],
        lambda: ["HDEL", key("hash"), field(), field()],
        lambda: ["HINCRBY", key("hash"), "7", number()],
        lambda: [chance.choice(["HLEN", "TYPE", "EXISTS"]), key("hash")],
        lambda: ["RENAME", key(kind := chance.choice(kinds)), key(kind)],
        lambda: [chance.choice(["HEXISTS", "HSTRLEN"]), key("hash"), field()],
        lambda: ["SADD", key("set"), field(), field()],
        lambda: ["SREM", key("set"), field(), field()],
        lambda: ["SISMEMBER", key("set"), field()],
        lambda: ["SCARD", key("set")],
        lambda: ["ZADD", key("zset"), number(), field(), number() / 2, field()],
        lambda: ["ZADD", key("zset"), chance.choice(["NX", "XX", "LT"]), number(), field()],
        lambda: ["ZREM", key("zset"), field()],
        lambda: [*chance.choice([["ZADD", f"{prefix}:lex", 0], ["ZREM", f"{prefix}:lex"]]), field()],
        lambda: ["ZRANGE", key("zset"), number(), number(), *chance.choice([[], ["WITHSCORES"]])],
        lambda: ["ZRANGEBYSCORE", key("zset"), chance.choice(["-inf", "(0", "1"]), chance.choice(["+inf", "(2", "2"])],
        lambda: ["ZRANGEBYSCORE", key("zset"), "-inf", "+inf", "WITHSCORES", "LIMIT", chance.randrange(3), number()],
        lambda: ["ZLEXCOUNT", f"{prefix}:lex", chance.choice(["-", "[b", "(b"]), chance.choice(["+", "[c", "(c"])],
        lambda: [chance.choice(["ZSCORE"]), key("zset"), field()],
        lambda: ["ZCARD", key("zset")],
        lambda: ["RPUSH", key("list"), field(), field()],
        lambda: ["LPOP", key("list")],
        lambda: ["LRANGE", key("list"), number(), number()],
        lambda: ["LTRIM", key("list"), number(), number()],
        lambda: ["LLEN", key("list")],
        lambda: ["BLPOP", key("list"), "0.001"],
        lambda: ["XADD", stream, "*", field(), number(), field(), field()],
        lambda: ["XADD", stream, "NOMKSTREAM", "*", field(), number()],
        lambda: ["XDEL", stream, entry(), entry()],
        lambda: ["XLEN", stream],
        lambda: ["XRANGE", stream, chance.choice(["-", entry()]), chance.choice(["+", entry()])],
        lambda: ["XREVRANGE", stream, "+", "-", "COUNT", chance.randrange(1, 4)],
        lambda: ["XTRIM", stream, "MINID", entry()],
        lambda: ["XTRIM", stream, "MAXLEN", chance.randrange(6)],
        lambda: ["XREAD", "COUNT", 2, "STREAMS", stream, stream, entry(), "0-0"],
        lambda: ["XREAD", "BLOCK", 1, "STREAMS", stream, entry()],
        lambda: ["DEL", key(chance.choice(kinds)), key("hash")],
        lambda: ["PEXPIRE", key(chance.choice(kinds)), chance.choice([TTL_MS, TTL_MS, TTL_MS, 0])],
        lambda: ["PERSIST", key(chance.choice(kinds))],
        lambda: ["PTTL", key(chance.choice(kinds))],
        lambda: ["TYPE", key(chance.choice(kinds))],
    ]
    return [chance.choice(makers)() for _ in range(COMMANDS_PER_SEED)]


@pytest.mark.parametrize("seed", range(3))
async def test_commands_in_any_order_have_the_same_replies(pair: Pair, key_prefix: str, seed: int) -> None:
    chance = random.Random(seed)
    commands = random_commands(chance, key_prefix)
    while commands:
        size = chance.randrange(1, 40)
        await pair.same(commands[:size])
        del commands[:size]
    names = [f"{key_prefix}:{kind}:{n}" for kind in ("string", "hash", "set", "zset", "list") for n in range(3)]
    await pair.same([["DEL", *names, f"{key_prefix}:lex", f"{key_prefix}:stream"]])


SCRIPTS = (
    "return {1, 2.9, 'text', true, false, 'after nil'}",
    "return redis.status_reply('FINE')",
    "return redis.error_reply('FENCED by a test')",
    "return {redis.pcall('INCR', KEYS[1]), redis.pcall('GET', KEYS[1]), redis.pcall('HGET', KEYS[1], 'f').err ~= nil}",
    "redis.call('SET', KEYS[1], 5) redis.call('HGET', KEYS[1], 'f') return 1",
    "redis.call('SET', KEYS[1], 12345678901234) return redis.call('GET', KEYS[1])",
    "return redis.call('HGET', KEYS[1] .. 'none', 'f') == false and redis.call('HMGET', KEYS[1] .. 'none', 'f')",
    "return {bit.band(-1, 5), bit.bor(8, 3), bit.band(4294967295, 255), bit.bor(2147483648, 1)}",
    "return cmsgpack.pack({'field', 1, 'other', -7, 'big', 123456789012, 'tenth', 0.1, string.rep('x', 40)})",
    "return cmsgpack.unpack(cmsgpack.pack({'field', 300, 'other'}))",
    "for i = 1, 3 do redis.call('RPUSH', KEYS[1] .. 'l', i) end return redis.call('LRANGE', KEYS[1] .. 'l', 0, -1)",
    "return redis.call('DEL', KEYS[1] .. 'l')",
    "return #ARGV .. ARGV[1] .. tostring(ARGV[3])",
    "error('of the script')",
    "return {redis.call('PTTL', KEYS[1] .. 'none'), redis.call('SET', KEYS[1], 'x', 'NX'), type(redis.call('PING'))}",
)


async def test_what_crosses_the_border_of_lua_is_the_same(pair: Pair, key_prefix: str) -> None:
    for at, source in enumerate(SCRIPTS):
        name = f"border_{at}"
        body = f"redis.register_function('{name}', function(KEYS, ARGV) {source} end)"
        await pair.same([["FUNCTION", "LOAD", "REPLACE", f"#!lua name={LIBRARIES}{at}\n{body}"]])
        await pair.same([["FCALL", name, 1, f"{key_prefix}:k", "one", b"\xff\x00"]])
        await pair.same([["GET", f"{key_prefix}:k"], ["DEL", f"{key_prefix}:k"]])
        await pair.same([["FUNCTION", "DELETE", f"{LIBRARIES}{at}"]])
        assert ["error ResponseError "] == await pair.same([["FCALL", name, 0]])


async def test_transactions_are_the_same(pair: Pair, key_prefix: str) -> None:
    key = f"{key_prefix}:k"
    replies = await pair.same([["MULTI"], ["SET", key, "x"], ["INCR", key], ["GET", key], ["EXEC"], ["DEL", key]])

    assert [b"OK", "error ResponseError ", b"x"] == replies[4]


async def test_what_a_server_refuses_without_memory_or_as_a_replica_is_what_it_says_of_its_commands(
    redis_url: str,
) -> None:
    asked = sorted(COMMANDS.keys() - {b"FUNCTION", b"FCALL", b"EVAL"})
    async with connect(redis_url, retries=0) as client:
        link = Link(client)
        await link.connect()
        (told,) = await link.ask([("COMMAND", "INFO", *asked)])
        await link.close()

    flags = {name: set(info[2]) for name, info in zip(asked, told, strict=True)}
    assert {name for name, of in flags.items() if b"denyoom" in of} == GROWING
    assert {name for name, of in flags.items() if b"write" in of} == WRITING


async def test_a_blocked_reader_is_served_by_who_comes_later_and_in_turn(
    redis_url: str, key_prefix: str, twin: Store
) -> None:
    """On both: of two who wait for one element the first gets it, and a stream's entry goes to all."""
    server = Server(twin, loop_timer)
    for client in (connect(redis_url, retries=0), direct_client(server)):
        links = [Link(client) for _ in range(4)]
        for link in links:
            await link.connect()
        stream, queue = f"{key_prefix}:stream", f"{key_prefix}:list"
        await _seen(links, stream, queue)
        await client.delete(stream, queue)
        for link in links:
            await link.close()
        await client.aclose()


async def _seen(links: list[Link], stream: str, queue: str) -> None:
    first, second, third, writer = links
    exchanges: list[Any] = []
    for link, command in (
        (first, ["BLPOP", queue, 30]),
        (second, ["BLPOP", queue, 30]),
        (third, ["XREAD", "BLOCK", 30_000, "STREAMS", stream, "0-0"]),
    ):
        exchanges.append(link.exchange([command]))
    waiting = [asyncio.ensure_future(exchange) for exchange in exchanges]
    await asyncio.sleep(0.05)
    await writer.exchange([["RPUSH", queue, "a"], ["RPUSH", queue, "b"], ["XADD", stream, "*", "f", "v"]])
    (one,), (two,), (((name, ((_, fields),)),),) = await asyncio.gather(*waiting)
    assert {b"a", b"b"} == {one[1], two[1]}
    assert (stream.encode(), [b"f", b"v"]) == (name, fields)
