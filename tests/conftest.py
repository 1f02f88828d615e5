"""Fixtures that every test may use: a real embedded server, a key prefix per test, and the check for leaked keys.

One server serves the whole run. Tests stay apart by key prefix, never by emptying the server. A test that must kill or
restart a server asks for `private_server` instead, which is its own.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from deploy.embedded import EmbeddedRedis

# The developer's own mesh must not leak into the tests' settings (it would also be refused where it is unknown).
for variable in [name for name in os.environ if name.startswith("SEQMESH_")]:
    del os.environ[variable]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the run's shared server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of the shared server, for settings and clients of one test; use together with `key_prefix`."""
    return redis_server


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A running server of the test's own, free to be killed, stopped and started again."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def key_prefix(request: pytest.FixtureRequest, redis_server: str) -> Iterator[str]:
    """A prefix no other test uses. Afterwards: fails on keys that would stay for ever, then removes all of them.

    A test that leaves such keys on purpose says so: `@pytest.mark.leaves_keys(reason="...")`.
    """
    prefix = f"t{uuid.uuid4().hex[:12]}"
    yield prefix
    with BlockingRedis.from_url(redis_server) as client:
        leaked = leaked_keys(client, prefix)
        for key in keys_under(client, prefix):
            client.unlink(key)
    if request.node.get_closest_marker("leaves_keys") is None:
        assert leaked == [], "keys without TTL that shared.keyspace.PERMANENT does not list"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An async client of the shared server; replies are bytes."""
    client = Redis.from_url(redis_url, decode_responses=False)
    yield client
    await client.aclose()


def leaked_keys(client: BlockingRedis, prefix: str) -> list[str]:
    """Keys under `prefix` that have no TTL and match no permanent pattern, sorted, each with its type."""
    patterns = permanent_patterns(prefix)
    leaked: list[str] = []
    for raw in keys_under(client, prefix):
        key = raw.decode(errors="replace")
        # -1: exists without TTL. -2: gone since the scan saw it.
        if client.ttl(raw) == -1 and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
            leaked.append(f"{key} ({client.type(raw)!r})")
    return sorted(leaked)


def keys_under(client: BlockingRedis, prefix: str) -> list[bytes]:
    """Every key of one test."""
    return list(cast("Iterator[bytes]", client.scan_iter(match=f"{prefix}:*", count=1000)))


def permanent_patterns(prefix: str) -> list[str]:
    """Glob patterns of whole keys that may stay for ever: `shared.keyspace.PERMANENT`, put under `prefix`."""
    if importlib.util.find_spec("shared.keyspace") is None:
        return ["*"]
    patterns: tuple[str, ...] = importlib.import_module("shared.keyspace").PERMANENT
    return [pattern if pattern.startswith(prefix) else f"{prefix}:{pattern}" for pattern in patterns]
