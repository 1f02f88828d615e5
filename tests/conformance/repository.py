"""Model repositories for a target: put together from configurations, a directory of its own per target.

A model is a directory under `models` (it works on a mesh and on Triton) or `mesh_models` (only on a mesh), or a
`ModelText` that a test writes. A model without a version directory gets the recorder as its version 1.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
MESH_MODELS = HERE / "mesh_models"
RECORDER = HERE / "recorder.py"


@dataclass(frozen=True)
class ModelText:
    """A model that a test writes down itself.

    config  text of config.pbtxt, without its name
    files   further files by their path in the model's directory; without `1/model.py` the recorder is put there
    """

    name: str
    config: str
    files: dict[str, str | bytes] = field(default_factory=dict)


Model = str | Path | ModelText
"""The name of a directory under models or mesh_models, any model directory, or a text."""


def standard_models(*, mesh: bool) -> list[Path]:
    """The models of the shared targets."""
    roots = (MODELS, MESH_MODELS) if mesh else (MODELS,)
    return sorted(path for root in roots for path in root.iterdir() if (path / "config.pbtxt").exists())


def build(repository: Path, models: Iterable[Model], *, instance_factor: int = 1) -> Path:
    """Writes the models into a repository; returns it.

    instance_factor  multiplies every `count` of an instance group: how one Triton stands for several executors
    """
    repository.mkdir(parents=True, exist_ok=True)
    for model in models:
        directory = write(repository, model)
        if instance_factor > 1:
            config = directory / "config.pbtxt"
            config.write_text(multiplied(config.read_text(), instance_factor))
    return repository


def write(repository: Path, model: Model) -> Path:
    """Writes one model; returns its directory."""
    if isinstance(model, ModelText):
        directory = repository / model.name
        files: dict[str, str | bytes] = {"config.pbtxt": f'name: "{model.name}"\n{model.config}', **model.files}
        for path, content in files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        source = model if isinstance(model, Path) else found(model)
        directory = repository / source.name
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("__pycache__"))
    if not any(path.is_dir() and path.name.isdigit() for path in directory.iterdir()):
        (directory / "1").mkdir()
        shutil.copy(RECORDER, directory / "1" / "model.py")
    return directory


def found(name: str) -> Path:
    """The directory of a model that is named."""
    return next(root / name for root in (MODELS, MESH_MODELS) if (root / name).is_dir())


def multiplied(config: str, factor: int) -> str:
    """A configuration with every `count: N` of its instance groups multiplied."""
    return re.sub(r"\bcount: (\d+)", lambda count: f"count: {int(count.group(1)) * factor}", config)
