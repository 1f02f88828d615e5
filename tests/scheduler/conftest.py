"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.store.commands import Redis
from tests.scheduler.stage import Stage


@pytest.fixture
async def stage(redis_server: str, redis: Redis, store_kind: str, key_prefix: str) -> AsyncIterator[Stage]:
    """A mesh with one known model, and nobody in it."""
    stage = Stage(redis_server, key_prefix, redis if store_kind == "twin" else None)
    await stage.publish()
    yield stage
    await stage.close()
