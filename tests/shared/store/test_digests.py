"""Reads of large values fetch what was written since, and find every other change after a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.store.commands import Redis
from shared.store.digests import IN_TURN_MIN, DigestedHash
from shared.store.keyspace import Keyspace
from shared.store.vital import vital

COUNT = 100


@pytest.fixture
async def stored(redis: Redis, key_prefix: str) -> DigestedHash[bytes]:
    keys = Keyspace(key_prefix)
    stored = DigestedHash(redis, keys.models, keys.model_digests, lambda name, value: name + b"=" + value)
    for at in range(COUNT):
        await redis.eval(*vital(*stored.written(f"m{at:02}", b"old")))
    return stored


async def all_of(stored: DigestedHash[bytes]) -> list[bytes]:
    found, _ = await stored.all()
    return sorted(found)


async def test_a_value_is_fetched_when_it_was_written(
    redis: Redis, stored: DigestedHash[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[bytes] = []
    hmget = redis.hmget

    async def counted(key: str, fields: Sequence[bytes]) -> Any:
        fetched.extend(fields)
        return await hmget(key, fields)

    assert COUNT == len(await all_of(stored))
    monkeypatch.setattr(redis, "hmget", counted)
    await all_of(stored)
    assert [] == fetched
    await redis.eval(*vital(*stored.written("m50", b"new")))
    assert b"m50=new" in await all_of(stored)
    assert [b"m50"] == fetched


async def test_what_is_removed_is_gone(redis: Redis, stored: DigestedHash[bytes], key_prefix: str) -> None:
    await stored.all()
    pipe = redis.pipeline(transaction=False)
    stored.remove(pipe, "m50")
    assert [1, 1] == await pipe.execute()

    assert COUNT - 1 == len(await all_of(stored))
    assert {"m49": b"m49=old"} == await stored.some(["m49", "m50"])
    assert None is await stored.one("m50")
    await redis.delete(Keyspace(key_prefix).models)
    assert [] == await all_of(stored)
    assert {} == await stored.some(["m01"])


async def test_a_value_that_was_written_without_its_digest_is_found(
    redis: Redis, stored: DigestedHash[bytes], key_prefix: str
) -> None:
    """By a release that knew of none, or by something else: at once if the value is new, and else after a while."""
    keys = Keyspace(key_prefix)
    names = [f"m{at:02}" for at in range(COUNT)]
    await stored.all()
    await redis.hset(keys.models, "other", b"old")
    assert b"other=old" in await all_of(stored)
    await redis.hset(keys.models, "other", b"new")
    assert b"other=new" in await all_of(stored)

    await redis.hset(keys.models, "m50", b"new")
    reads = 0
    while b"m50=new" not in await all_of(stored):
        reads += 1
    assert reads <= COUNT // IN_TURN_MIN + 1
    await redis.hset(keys.models, "m50", b"newer")
    assert b"m50=newer" in await all_of(stored), "its digest is that of another value"
    await redis.hset(keys.models, "m51", b"new")
    found = [await stored.some(names) for _ in range(COUNT // IN_TURN_MIN + 1)]
    assert b"m51=new" == found[-1]["m51"]


async def test_values_that_vanish_without_their_digests_are_missed(
    redis: Redis, stored: DigestedHash[bytes], key_prefix: str
) -> None:
    names = [f"m{at:02}" for at in range(COUNT)]
    assert COUNT == len(await stored.some(names))
    await redis.delete(Keyspace(key_prefix).models)
    assert {} == await stored.some(names)
