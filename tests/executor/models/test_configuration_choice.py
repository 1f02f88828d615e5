"""Which configuration an executor reads for a model, and whether the model may add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.models.repository import ModelRepository
from executor.models.version_maker import LoadOptions
from executor.workers.devices import Devices
from shared.contract.errors import LoadError

MODEL = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def execute(self, requests):
        raise NotImplementedError
"""
TENSORS = 'input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the model `m`: two instances by its config.pbtxt, three by configs/three.pbtxt."""
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (tmp_path / "m" / "config.pbtxt").write_text("instance_group { kind: KIND_CPU count: 2 }")
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "configs" / "three.pbtxt").write_text(f"instance_group {{ kind: KIND_CPU count: 3 }} {TENSORS}")
    return tmp_path


@pytest.mark.parametrize(
    ("config_name", "auto_complete", "instances"), [("", True, 2), ("three", True, 3), ("three", False, 3)]
)
async def test_configuration_is_chosen_by_name(
    folder: Path, config_name: str, auto_complete: bool, instances: int
) -> None:
    repository = ModelRepository([folder], Devices(), LoadOptions(config_name, auto_complete=auto_complete))

    model = repository.load("m")

    assert instances == model.record.config.instance_count
    await repository.close()


async def test_model_that_may_not_complete_its_configuration_must_have_one(folder: Path) -> None:
    repository = ModelRepository([folder], Devices(), LoadOptions(auto_complete=False))

    with pytest.raises(LoadError, match="must specify at least one 'input' for m"):
        repository.load("m")
    (folder / "m" / "config.pbtxt").unlink()
    with pytest.raises(LoadError, match="failed to open text file for read"):
        repository.load("m")

    await repository.close()
