"""An executor of the sample that sums."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.executor.living import Running, living
from tests.mesh.model_repository import add_sum_model
from tests.scripted_mesh import ScriptedMesh


@pytest.fixture
async def executor(redis_url: str, key_prefix: str, tmp_path: Path, mesh: ScriptedMesh) -> AsyncIterator[Running]:
    add_sum_model(tmp_path / "models", "sum")
    async with living(redis_url, key_prefix, tmp_path / "models", "sum", "a") as running:
        yield running
