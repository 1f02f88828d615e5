"""A model repository of one model, written from a configuration's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from executor.configuration.load import AutoComplete, LoadedConfig, load_model_config
from shared.contract.model_config import SequenceBatching

IN = 'input { name: "X" data_type: TYPE_FP32 dims: 4 }'
IO = f'{IN} output {{ name: "Y" data_type: TYPE_FP32 dims: 4 }} max_batch_size: 8'


def unchanged(config_json: str, version_dir: Path) -> str:
    """A backend that has nothing to complete."""
    return config_json


INSTALLED: dict[str, AutoComplete] = {"python": unchanged, "pytorch": unchanged}

LoadText = Callable[..., LoadedConfig]


def sequence_of(loaded: LoadedConfig) -> SequenceBatching:
    batching = loaded.config.sequence_batching
    assert batching is not None
    return batching


@pytest.fixture
def load_text(tmp_path: Path) -> LoadText:
    """Writes the model `m` (or `name`) and loads it; `files` lie in each of the `versions`."""

    def load(
        text: str | None,
        *,
        name: str = "m",
        files: Sequence[str] = ("model.py",),
        versions: Sequence[str] = ("1",),
        backends: Mapping[str, AutoComplete] = INSTALLED,
        gpu_count: int = 0,
        override_json: str | None = None,
        **options: Any,
    ) -> LoadedConfig:
        model_dir = tmp_path / name
        for version in versions:
            (model_dir / version).mkdir(parents=True, exist_ok=True)
            for file in files:
                (model_dir / version / file).touch()
        if text is not None:
            (model_dir / "config.pbtxt").write_text(text)
        return load_model_config(
            model_dir, backends=backends, gpu_count=gpu_count, override_json=override_json, **options
        )

    return load
