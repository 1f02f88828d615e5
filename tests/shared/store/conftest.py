"""Fixtures of what is done to a server of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis as SyncRedis

from tests.embedded_redis import EmbeddedRedis


@pytest.fixture
def server(private_server: EmbeddedRedis) -> Iterator[Any]:
    """A client for what is done to the server."""
    with SyncRedis.from_url(private_server.url) as client:
        yield client
