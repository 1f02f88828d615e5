"""On which devices the instances of a model are."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.configuration.load import load_model_config
from executor.engine.python.backend import PythonBackend
from executor.workers.devices import Devices

CONFIG = """
backend: "python"
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_GPU GROUP } ]
"""


@pytest.mark.parametrize(
    ("gpus", "group", "expected"),
    [
        ((0, 1), "", ["cuda:0", "cuda:1"]),
        ((1,), "", ["cuda:1"]),
        ((3, 2), "", ["cuda:3", "cuda:2"]),
        ((2, 3), "gpus: [ 1 ]", ["cuda:3"]),
        ((1,), "gpus: [ 0 ] count: 2", ["cuda:1", "cuda:1"]),
    ],
)
def test_instances_are_on_the_gpus_that_the_executor_is_to_use(
    tmp_path: Path, gpus: tuple[int, ...], group: str, expected: list[str]
) -> None:
    """Where each executor of a machine has a GPU of its own, all would else be on the first one."""
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    (folder / "config.pbtxt").write_text(CONFIG.replace("GROUP", group))
    backends = {"python": PythonBackend().auto_complete}
    config = load_model_config(folder, backends=backends, gpu_count=len(gpus), auto_complete=False).config

    assert expected == [place for _, place in Devices(gpus).places(config)]
