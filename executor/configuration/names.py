"""Names behind the numbers of the schema's enums, and what several rules ask of a path or a shape.

Source: triton-spec section 4, "data types"; Triton's model_config.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.configuration.schema import POOL
from shared.contract.errors import ConfigError
from shared.contract.tensors import RANK_MAX

Part = Any
"""A message inside the configuration, of a class made at run time."""


def enum_names(full_name: str) -> dict[int, str]:
    """Number -> name of an enum of the schema."""
    return {number: value.name for number, value in POOL.FindEnumTypeByName(full_name).values_by_number.items()}


def enum_numbers(full_name: str) -> dict[str, int]:
    """Name -> number of an enum of the schema."""
    return {name: number for number, name in enum_names(full_name).items()}


TYPE_NAMES = enum_names("inference.DataType")
CONTROL_NAMES = enum_names("inference.ModelSequenceBatching.Control.Kind")
BATCH_INPUT_NAMES = enum_names("inference.BatchInput.Kind")
BATCH_OUTPUT_NAMES = enum_names("inference.BatchOutput.Kind")

KIND = enum_numbers("inference.ModelInstanceGroup.Kind")
"""Kind of an instance group -> number."""

QUEUE_DELAY = enum_numbers("inference.ModelQueuePolicy.TimeoutAction")["DELAY"]
"""Number of the queue policy's timeout action DELAY."""


def has_type(part: Part) -> bool:
    """Whether a tensor's declaration has a data type that is known."""
    return TYPE_NAMES.get(part.data_type, "TYPE_INVALID") != "TYPE_INVALID"


def wire_type(data_type: int) -> str:
    """The wire's name of a data type: TYPE_FP32 is FP32, TYPE_STRING is BYTES."""
    name = TYPE_NAMES[data_type].removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def are_dims(dims: Sequence[int]) -> bool:
    """Whether each dimension is at least 1, or -1 for a variable one."""
    return all(dim >= 1 or dim == -1 for dim in dims)


def check_rank(model: str, what: str, dims: Sequence[int]) -> None:
    """Raises ConfigError for more dimensions than a tensor can have. what: the tensor, as its error begins"""
    if len(dims) > RANK_MAX:
        raise ConfigError(f"{what} has {len(dims)} dimensions, of at most {RANK_MAX}, for {model}")


def leaves_directory(path: str) -> bool:
    """Whether a path that should stay inside its directory would lead out of it."""
    return path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/")
