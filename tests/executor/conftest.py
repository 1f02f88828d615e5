"""Fixtures: the mesh around an executor by hand, and what loads the models of a test's `repository`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from executor.models.loader import Loader
from executor.models.repository import ModelRepository
from shared.store.commands import Redis
from tests.executor.living import loading, scripted
from tests.scripted_mesh import ScriptedMesh


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> AsyncIterator[ScriptedMesh]:
    """For one model, `sum`."""
    async with scripted(redis, key_prefix, "sum") as mesh:
        yield mesh


@pytest.fixture
async def loader(repository: ModelRepository, redis_url: str, key_prefix: str) -> AsyncIterator[Loader]:
    async with loading(redis_url, key_prefix, repository) as loader:
        yield loader
