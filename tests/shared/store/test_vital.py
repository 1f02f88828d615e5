"""Writes of a process that takes part: one step, mended like any other, also where Redis has no memory."""

from __future__ import annotations

from typing import Any

from shared.store.keyspace import Keyspace
from shared.store.vital import vital


async def test_each_command_has_its_reply_in_order(redis: Any, key_prefix: str) -> None:
    keys = Keyspace(key_prefix)
    lease = keys.scheduler("s1")
    commands = [("SET", lease, b"\xff\x00", "PX", 60_000), ("PTTL", lease), ("HSET", keys.models, "a", 1, "b", 2)]

    done, left_ms, added = await redis.eval(*vital(*commands))

    assert (b"OK", 2) == (done, added)
    assert 0 < left_ms <= 60_000
    assert b"\xff\x00" == await redis.get(lease)
    assert {b"a": b"1", b"b": b"2"} == await redis.hgetall(keys.models)


async def test_a_key_of_another_type_is_removed_as_for_a_plain_command(redis: Any, key_prefix: str) -> None:
    keys = Keyspace(key_prefix)
    await redis.set(keys.executors, "no hash")

    await redis.eval(*vital(("SET", keys.scheduler("s1"), "", "PX", 60_000), ("HSET", keys.executors, "e", 1)))

    assert {b"e": b"1"} == await redis.hgetall(keys.executors)
