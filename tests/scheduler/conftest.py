"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.stage import Stage


@pytest.fixture
async def stage(redis_url: str, key_prefix: str) -> AsyncIterator[Stage]:
    """A mesh with one known model, and nobody in it."""
    stage = Stage(redis_url, key_prefix)
    await stage.publish()
    yield stage
    await stage.close()
