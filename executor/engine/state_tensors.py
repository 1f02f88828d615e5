"""The implicit state of a sequence before its first step (zeros, or a file's content), and the check of a checkpoint's.

The rules of size are Triton's (triton-spec 2): a file that is too short is refused with Triton's message, a file that
is too long is cut, and a BYTES state takes the whole file. Unlike in Triton, a state without `initial_state` begins as
zeros.
"""

from __future__ import annotations

from pathlib import Path

from executor.engine import shapes
from executor.engine.null_rows import zeros
from shared.contract.errors import LoadError, ModelError
from shared.contract.model_config import StateSpec
from shared.contract.tensors import ELEMENT_BYTES, Tensor, bytes_elements, check_tensor, element_count, shape_text


def size_problem(size: int, bytes_max: int) -> str | None:
    """Why a state of so many bytes cannot be kept; None if Redis takes it."""
    if size <= bytes_max:
        return None
    return f"it has {size} bytes, and Redis, which keeps it, takes no value beyond {bytes_max} (proto-max-bulk-len)"


def initial_state(model_dir: Path, spec: StateSpec, bytes_max: int) -> Tensor:
    """The first content of a state, by its input name and without the batch dimension; variable dims are 1.

    bytes_max  largest state
    raises     LoadError when the file under `<model>/initial_state/` is missing or too short, and for a state of fixed
               size that is too large
    """
    shape = spec.initial_dims if spec.initial_dims is not None else shapes.smallest(spec.dims)
    # An element of BYTES has four bytes at least.
    problem = size_problem(element_count(shape) * ELEMENT_BYTES.get(spec.datatype, 4), bytes_max)
    if problem is not None:
        raise LoadError(f"state '{spec.input_name}' cannot be kept: {problem}")
    raw = _content(model_dir / "initial_state" / spec.initial_file, spec, shape) if spec.initial_file else None
    return Tensor(spec.input_name, spec.datatype, shape, zeros(spec.datatype, shape) if raw is None else raw)


def check_checkpoint(spec: StateSpec, tensor: Tensor | None) -> None:
    """Raises ModelError unless a checkpoint's tensor can be this state."""
    if tensor is None:
        raise ModelError(f"the checkpoint has no state '{spec.input_name}'")
    if tensor.datatype != spec.datatype or not shapes.fits(tensor.shape, spec.dims):
        raise ModelError(
            f"the checkpoint's state '{spec.input_name}' is {tensor.datatype} {shape_text(tensor.shape)}, "
            f"but the model's is {spec.datatype} {shape_text(spec.dims)}"
        )
    # A batch is one buffer per state: a byte too many would shift every later row into its neighbour's state.
    try:
        check_tensor(tensor)
        if spec.datatype == "BYTES":
            _check_elements(tensor.raw, tensor.shape)
    except ValueError as error:
        raise ModelError(f"the checkpoint's state '{spec.input_name}' is damaged: {error}") from error


def _content(path: Path, spec: StateSpec, shape: shapes.Shape) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LoadError(
            f"cannot read the initial state of '{spec.input_name}' from {path}: {error.strerror}"
        ) from error
    if spec.datatype == "BYTES":
        try:
            _check_elements(content, shape)
        except ValueError as error:
            raise LoadError(f"initial state of '{spec.input_name}' in {path}: {error}") from error
        return content
    expected = element_count(shape) * ELEMENT_BYTES[spec.datatype]
    if len(content) < expected:
        # Without a space before "only", as in Triton's message.
        raise LoadError(
            f"initial_state setting expects {expected} bytes, but the data provided from "
            f"{spec.initial_file}only has {len(content)} bytes."
        )
    return content[:expected]


def _check_elements(content: bytes, shape: shapes.Shape) -> None:
    """Raises ValueError unless the content is as many BYTES elements as the shape asks for."""
    count = sum(1 for _ in bytes_elements(content))
    if count != element_count(shape):
        raise ValueError(f"it has {count} elements, but its shape {shape_text(shape)} asks for {element_count(shape)}")
