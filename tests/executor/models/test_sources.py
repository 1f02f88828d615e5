"""Where models are read from: the repositories that are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.models.sources import open_sources
from shared.contract.errors import MeshError


def test_a_folder_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """An executor that began without it would serve nothing, and say nothing of it."""
    here, missing = tmp_path / "here", tmp_path / "missing"
    here.mkdir()

    with pytest.raises(MeshError, match=f"no model repository at {missing}: --models names a directory of models"):
        open_sources([here, missing], tmp_path / "cache", 1)
