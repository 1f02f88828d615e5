"""Names of classes: read from the model's folder, and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor.models.labels import read_labels
from shared.contract.errors import LoadError
from shared.contract.limits import LABEL_FILE_BYTES_MAX
from shared.contract.model_config import ModelConfig, TensorSpec


def config(*filenames: str) -> ModelConfig:
    outputs = tuple(TensorSpec(f"OUT{i}", "FP32", (4,), label_filename=name) for i, name in enumerate(filenames))
    return ModelConfig("m", "python", "", 0, (), outputs)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("cat\ndog\n\nbird\n", ("cat", "dog", "", "bird")),
        ("cat", ("cat",)),
        ("\n", ("",)),
        ("", ()),
        ("Fuß\n", ("Fuß",)),
    ],
)
def test_each_line_is_a_class(tmp_path: Path, content: str, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_text(content)

    assert {"OUT1": labels} == read_labels(config("", "labels.txt"), tmp_path)


def test_a_file_outside_the_models_folder_stays_unread(tmp_path: Path) -> None:
    """A load request may bring the configuration; classification would show the file to everybody."""
    (tmp_path / "secret").write_text("password")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")

    for name in ("../secret", str(tmp_path / "secret"), "link"):
        with pytest.raises(LoadError, match="is not in the model's directory"):
            read_labels(config(name), folder)


def test_a_file_that_cannot_be_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(LABEL_FILE_BYTES_MAX + 1))
    (tmp_path / "binary").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")

    for name, cause in (
        ("large", "longer than 1048576 bytes"),
        ("pipe", "it is no file"),
        ("binary", ""),
        ("missing", ""),
    ):
        with pytest.raises(LoadError, match=f"failed to read label file '{name}' of model 'm': {cause}"):
            read_labels(config(name), tmp_path)
