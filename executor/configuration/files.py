"""Files that a configuration speaks of, beside the model itself: are they there, and long enough?

Source: triton-spec sections 2 (initial state), 3.4 (custom batching) and 4 (model_warmup).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG

from executor.configuration.names import wire_type
from executor.configuration.parameters import STRATEGY
from executor.configuration.rules.warmup import NO_ID
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.tensors import ELEMENT_BYTES


def check_readable(path: Path, bytes_max: int) -> None:
    """Raises OSError for a file that must not be read: it is not there, is longer than that, or is no file but a pipe,
    which may keep its readers waiting, or a device, which may never end.
    """
    found = path.stat()
    if found.st_size > bytes_max:
        raise OSError(f"longer than {bytes_max} bytes")
    if not S_ISREG(found.st_mode):
        raise OSError("it is no file")


def check_files(config: ConfigMessage, model_dir: Path, version_dir: Path) -> None:
    """Initial states, warm-up data and batching libraries of a valid configuration.

    raises  ConfigError for the first file that is missing, too short or not supported
    """
    _check_no_batching_library(config, model_dir, version_dir)
    _check_initial_files(config, model_dir / "initial_state")
    _check_warmup_files(config, model_dir / "warmup")


def _check_no_batching_library(config: ConfigMessage, model_dir: Path, version_dir: Path) -> None:
    """Refuses `batchstrategy.so` in the places from which Triton loads it: ignored, it would silently change the
    batches.

    A strategy in Python, which the executor loads, takes the library's place.
    """
    if config.HasField("sequence_batching") or not config.HasField("dynamic_batching"):
        return
    folders = (version_dir, model_dir)
    if STRATEGY in config.parameters or any((folder / "batchstrategy.py").exists() for folder in folders):
        return
    for path in (folder / "batchstrategy.so" for folder in folders):
        if path.exists():
            raise ConfigError(
                f"{path} is not supported for {config.name}: a batch strategy is a Python file here, batchstrategy.py"
            )


def _check_initial_files(config: ConfigMessage, folder: Path) -> None:
    for state in config.sequence_batching.state:
        for initial in state.initial_state:
            if initial.WhichOneof("state_data") == "data_file":
                shortage = _shortage(config, folder, initial.data_file, initial.data_type, initial.dims)
                if shortage:
                    raise ConfigError(f"{shortage}.")


def _check_warmup_files(config: ConfigMessage, folder: Path) -> None:
    for sample in config.model_warmup:
        for name in sorted(sample.inputs) if sample.batch_size else ():
            tensor = sample.inputs[name]
            if tensor.WhichOneof("input_data_type") == "input_data_file":
                shortage = _shortage(config, folder, tensor.input_data_file, tensor.data_type, tensor.dims)
                if shortage:
                    raise ConfigError(f"{NO_ID}{shortage}")


def _shortage(config: ConfigMessage, folder: Path, file: str, data_type: int, dims: Sequence[int]) -> str:
    """What a tensor's file lacks; "" if nothing. A longer file is cut. STRING takes all of it, however short."""
    size = _size(folder / file, folder.name, config.name)
    needed = math.prod(dims) * ELEMENT_BYTES.get(wire_type(data_type), 0)
    # The space that is missing before "only" is missing in Triton too.
    text = f"{folder.name} setting expects {needed} bytes, but the data provided from {file}only has {size} bytes"
    return text if size < needed else ""


def _size(path: Path, what: str, model: str) -> int:
    try:
        if path.is_file():
            return path.stat().st_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"failed to read {what} file {path} for {model}: {error}") from error
    raise ConfigError(f"failed to read {what} file {path} for {model}: there is no such file")
