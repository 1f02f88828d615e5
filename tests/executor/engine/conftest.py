"""A directory to make models in, and the models that lie beside the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.engine.model_workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fixture_models() -> Path:
    """Models written for Triton, as they are."""
    return Path(__file__).parents[2] / "fixtures" / "models"
