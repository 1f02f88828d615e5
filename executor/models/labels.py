"""The names of an output's classes, from the files that `label_filename` names (triton-spec 4, 5.4).

Gateways write them into classifications and have no model repository: the names travel with the model's record.
"""

from __future__ import annotations

from pathlib import Path

from executor.configuration.files import check_readable
from shared.contract.errors import LoadError
from shared.contract.limits import LABEL_FILE_BYTES_MAX
from shared.contract.model_config import ModelConfig


def read_labels(config: ModelConfig, model_dir: Path) -> dict[str, tuple[str, ...]]:
    """Output -> names by index, one line of the file each; an empty line is a class without a name.

    raises  LoadError for a file that is missing, too large, no text or outside the model's directory
    """
    return {
        output.name: _lines(model_dir, output.label_filename, config.name)
        for output in config.outputs
        if output.label_filename
    }


def _lines(model_dir: Path, filename: str, model: str) -> tuple[str, ...]:
    # A load request may bring a configuration; it must not make other files of this machine readable.
    path = (model_dir / filename).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise LoadError(f"label file '{filename}' of model '{model}' is not in the model's directory")
    try:
        check_readable(path, LABEL_FILE_BYTES_MAX)
        content = path.read_bytes()
        return tuple(content.decode().removesuffix("\n").split("\n")) if content else ()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"failed to read label file '{filename}' of model '{model}': {error}") from error
