"""Fixtures: a mesh by hand, and what is done to a server of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis as SyncRedis

from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import ScriptedMesh


@pytest.fixture
def shards() -> int:
    """Of the test's mesh: one, so that any two sequences can be in one call. A file may want more."""
    return 1


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str, shards: int) -> ScriptedMesh:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, shards), "sum")
    await mesh.open()
    return mesh


@pytest.fixture
def server(private_server: EmbeddedRedis) -> Iterator[Any]:
    """A client for what is done to the server."""
    with SyncRedis.from_url(private_server.url) as client:
        yield client
