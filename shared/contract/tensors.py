"""Tensors as the wire knows them: a name, a datatype, a shape and little-endian bytes.

The gateway moves these bytes without looking inside; numpy views are made where a model runs. BYTES tensors are
sequences of elements, each a 4-byte little-endian length and its bytes (binary tensor extension of the v2 protocol).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

NUMPY_TYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""BF16 has no numpy type (its bits travel as uint16); BYTES becomes an object array."""

ELEMENT_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in NUMPY_TYPE.items()} | {"BF16": 2}
"""Size of one element, bytes. BYTES is not in it, because its elements have no fixed size."""

RANK_MAX = 64
"""Dimensions of a tensor that a client sends; numpy and torch know no more. The product of very many is a number of
megabytes, and takes hours."""

DATATYPE_OF: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPE.items()}
FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
"""Datatypes of numbers with a fraction."""
TEXT_KINDS = "OSTU"
"""Kinds of numpy's arrays that are BYTES: objects, and strings of each of its types."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on its way.
    `shape` includes the batch dimension; `raw` has exactly the bytes that the shape asks for.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes


def element_count(shape: Sequence[int]) -> int:
    """Number of elements; 1 for the empty shape."""
    return math.prod(shape)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as Triton's messages write it: `[1,-1,16]`."""
    return f"[{','.join(map(str, shape))}]"


def config_type(datatype: str) -> str:
    """A datatype as configurations name it."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def are_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes can mean the same; -1 fits every size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def reshaped(shape: Sequence[int], dims: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """The shape that a configuration's `reshape` makes of a tensor's: the sizes of the -1 dimensions fill the -1
    dimensions of the target, in order. No shape here has the batch dimension.

    dims, target  the declared shapes before and after; they have equally many -1 dimensions
    """
    variable = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(variable) if dim == -1 else dim for dim in target)


def check_tensor(tensor: Tensor) -> None:
    """Raises ValueError for a tensor whose bytes do not match its datatype and shape. The elements of BYTES are not
    read; there only the shape is checked.
    """
    size = ELEMENT_BYTES.get(tensor.datatype)
    if size is None and tensor.datatype != "BYTES":
        raise ValueError(f"tensor '{tensor.name}' has no known datatype: {tensor.datatype[:64]!r}")
    if tensor.shape and not 0 <= min(tensor.shape) <= max(tensor.shape) < 1 << 63:
        raise ValueError(f"tensor '{tensor.name}' has no shape: {tensor.shape}")
    if size is not None and len(tensor.raw) != size * element_count(tensor.shape):
        raise ValueError(f"tensor '{tensor.name}' has {len(tensor.raw)} bytes, which is not what {tensor.shape} takes")


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A read-only view on the bytes (BYTES: an object array of `bytes`; BF16: its bits as uint16). Raises ValueError if
    they are not as many as the shape asks for.
    """
    if tensor.datatype == "BYTES":
        return np.array(list(bytes_elements(tensor.raw)), dtype=np.object_).reshape(tensor.shape)
    dtype = np.dtype("<u2") if tensor.datatype == "BF16" else NUMPY_TYPE[tensor.datatype]
    return np.frombuffer(tensor.raw, dtype=dtype).reshape(tensor.shape)


def described(tensors: Mapping[str, Tensor]) -> str:
    """One line for the log: each tensor's name, datatype, shape, mean and norm."""
    return "; ".join(f"{name} {_description(tensor)}" for name, tensor in tensors.items())


def _description(tensor: Tensor) -> str:
    kind = f"{tensor.datatype} {shape_text(tensor.shape)}"
    if tensor.datatype == "BYTES":
        return f"{kind} {len(tensor.raw)} bytes"
    values = as_float(tensor)
    mean = float(values.mean()) if values.size else 0.0
    return f"{kind} mean {mean:.6g} norm {float(np.linalg.norm(values.reshape(-1))):.6g}"


def as_float(tensor: Tensor) -> NDArray[np.float64]:
    """The numbers as 64 bits, in which each one with a fraction is exact. Not for BYTES."""
    array = to_numpy(tensor)
    if tensor.datatype == "BF16":
        # A BF16 number is the upper half of the FP32 number with the same bits.
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def float_bytes(datatype: str, values: NDArray[np.float64]) -> bytes:
    """The content of a tensor of one of the `FLOATS`; a number that the datatype lacks is rounded."""
    if datatype == "BF16":
        # The upper half of the FP32 number.
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY_TYPE[datatype]).tobytes()


def from_numpy(name: str, array: NDArray[Any], datatype: str | None = None) -> Tensor:
    """The wire form of an array of little-endian numbers; object and string arrays become BYTES."""
    if array.dtype.kind in TEXT_KINDS or datatype == "BYTES":
        return Tensor(name, "BYTES", array.shape, pack_bytes(array.reshape(-1).tolist()))
    return Tensor(name, datatype or DATATYPE_OF[array.dtype], array.shape, array.tobytes())


def pack_bytes(elements: Iterable[bytes | str]) -> bytes:
    """BYTES elements, row-major, in their wire form; strings as UTF-8."""
    packed = bytearray()
    for element in elements:
        data = element.encode() if isinstance(element, str) else element
        packed += len(data).to_bytes(4, "little")
        packed += data
    return bytes(packed)


def bytes_elements(raw: bytes) -> Iterable[bytes]:
    """The elements of a BYTES tensor. Raises ValueError when `raw` ends inside an element."""
    position = 0
    while position < len(raw):
        if position + 4 > len(raw):
            raise ValueError("incomplete string length indicator")
        (size,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + size > len(raw):
            raise ValueError("incomplete string element")
        yield raw[position : position + size]
        position += size
