"""The check that runs after every test which uses Redis finds what would stay for ever, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.key_leaks import keys_under, leaked_keys, remove_keys


@pytest.fixture
def client(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


def test_keys_with_a_ttl_and_permanent_keys_are_no_leak(client: Redis, key_prefix: str) -> None:
    client.set(f"{key_prefix}:1:{{0}}:tombstone:a", "1", ex=60)
    client.hset(f"{key_prefix}:1:{{mesh}}:models", "sum", "1")
    client.set(f"{key_prefix}:1:{{3}}:epoch", "1")

    assert leaked_keys(client, key_prefix) == []


def test_any_other_key_without_a_ttl_is_a_leak(client: Redis) -> None:
    client.set("leaky:1:{mesh}:forgotten", "1")
    client.hset("leaky:1:{0}:seq:a", "1", "1")

    assert leaked_keys(client, "leaky") == ["leaky:1:{0}:seq:a (hash)", "leaky:1:{mesh}:forgotten (string)"]
    assert leaked_keys(client, "leaky", sequences_may_live=True) == ["leaky:1:{mesh}:forgotten (string)"]

    remove_keys(client, "leaky")
    assert keys_under(client, "leaky") == []
