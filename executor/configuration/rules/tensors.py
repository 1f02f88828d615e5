"""Rules of declared inputs and outputs, with Triton's messages.

Source: triton-spec section 4, "IO messages"; Triton core, model_config_utils.cc (ValidateIOShape, ValidateModelInput,
ValidateModelOutput, ValidateNonLinearFormatIO).
"""

from __future__ import annotations

import itertools
import math

from executor.configuration.names import Part, are_dims, check_rank, has_type
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

IMAGE_RANK = 3
"""Dimensions of a tensor in one of the image formats."""


def check_tensors(config: ConfigMessage) -> None:
    """Checks every input and output by itself, that there are some, and that each name comes once.

    raises  ConfigError for the first broken rule
    """
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names: set[str] = set()
        for tensor in tensors:
            _check_tensor(config, kind, tensor)
            if tensor.name in names:
                raise ConfigError(f"model {kind} '{tensor.name}' is specified more than once for {config.name}")
            names.add(tensor.name)
    sequence = config.sequence_batching
    if not (config.input or sequence.control_input or sequence.state):
        raise _without("input", config.name)
    if not config.output:
        raise _without("output", config.name)


def _without(kind: str, model: str) -> ConfigError:
    return ConfigError(
        f"must specify at least one '{kind}' for {model}: its backend could not complete them; declare them in "
        "config.pbtxt"
    )


def _check_tensor(config: ConfigMessage, kind: str, tensor: Part) -> None:
    model = config.name
    if not tensor.name:
        raise ConfigError(f"model {kind} must specify 'name' for {model}")
    prefix = f"model {kind} '{tensor.name}'"
    if not has_type(tensor):
        raise ConfigError(f"{prefix} must specify 'data_type' for {model}")
    if not tensor.dims:
        raise ConfigError(f"{prefix} must specify 'dims' for {model}")
    _check_shapes(config, prefix, tensor)
    if kind == "input" and tensor.format and len(tensor.dims) != IMAGE_RANK:
        raise ConfigError(f"model input NHWC/NCHW require 3 dims for {model}")
    if tensor.is_shape_tensor:
        raise ConfigError(f"shape tensors are only supported for TensorRT platform for {model}")
    if tensor.is_non_linear_format_io:
        raise ConfigError(f"Non-linear IO format is only supported for the TensorRT platform for {model}")


def _check_shapes(config: ConfigMessage, prefix: str, tensor: Part) -> None:
    model, reshaped = config.name, tensor.HasField("reshape")
    if reshaped and not tensor.reshape.shape and config.max_batch_size == 0:
        raise ConfigError(
            f"{prefix} cannot have empty reshape for non-batching model as scalar tensors are not supported for {model}"
        )
    check_rank(model, prefix, tensor.dims)
    check_rank(model, f"{prefix} reshape", tensor.reshape.shape)
    if not are_dims(tensor.dims):
        raise ConfigError(
            f"{prefix} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    if reshaped:
        _check_reshape(model, prefix, list(tensor.dims), list(tensor.reshape.shape))


def _check_reshape(model: str, prefix: str, dims: list[int], shape: list[int]) -> None:
    if not are_dims(shape):
        raise ConfigError(
            f"{prefix} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    ours, theirs = _trunks(dims), _trunks(shape)
    if (-1 in dims) == (-1 in shape) and len(ours) != len(theirs):
        raise ConfigError(f"{prefix} has different number of variable-size dimensions for dims and reshape for {model}")
    if ours != theirs:
        raise ConfigError(f"{prefix} has different size for dims and reshape for {model}")


def _trunks(dims: list[int]) -> list[int]:
    """Element counts of the stretches between variable dimensions: [2, 4, -1, 6] is [8, 6]."""
    cuts = [-1, *(index for index, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[start + 1 : end]) for start, end in itertools.pairwise(cuts)]
