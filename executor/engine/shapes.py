"""Shapes as the configuration declares them, and as the model itself wants them.

Pure. No shape here has the batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.contract.model_config import TensorSpec
from shared.contract.tensors import reshaped

Shape = tuple[int, ...]


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether `dims` allows a shape (-1 allows any size)."""
    return len(shape) == len(dims) and all(dim in (size, -1) for size, dim in zip(shape, dims, strict=True))


def declared_by_model(spec: TensorSpec) -> Shape:
    """The dims that the model itself works with."""
    return spec.dims if spec.reshape is None else spec.reshape


def for_model(spec: TensorSpec, shape: Shape) -> Shape:
    """The shape that the model gets for a client's shape."""
    return shape if spec.reshape is None else reshaped(shape, spec.dims, spec.reshape)


def for_client(spec: TensorSpec, shape: Shape) -> Shape:
    """The shape that the client gets for a model's shape."""
    return shape if spec.reshape is None else reshaped(shape, spec.reshape, spec.dims)


def smallest(dims: Sequence[int]) -> Shape:
    """`dims` with every variable dimension at 1, as Triton begins a variable state (triton-spec 2)."""
    return tuple(1 if dim == -1 else dim for dim in dims)
