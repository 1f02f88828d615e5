from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from shared.contract.errors import LoadError
from shared.contract.tensors import ELEMENT_BYTES, NUMPY_TYPE

TORCH_TYPE: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    **{name: getattr(torch, dtype.name) for name, dtype in NUMPY_TYPE.items()},
}
"""BYTES is not in it: torch has no tensors of strings. A model takes and returns `List[str]`."""

DATATYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_TYPE.items()}

STORAGE_TYPE: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.bfloat16: torch.int16,
}
"""Types of the same size, for operations that torch or numpy lacks. They only move bits, and never compute."""


def datatype_of(name: str, dtype: torch.dtype) -> str:
    """The wire's name of a tensor's type. Raises LoadError if it has none. name: the tensor's"""
    if dtype not in DATATYPE:
        raise LoadError(f"tensor '{name}' of the model is a {dtype}, which no request or state can carry")
    return DATATYPE[dtype]


def tensor_of(parts: Iterable[bytes], datatype: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """One writable tensor of a shape from the bytes of its pieces, in order.

    Raises ValueError when the bytes are not what the shape asks for.
    """
    buffer = bytearray().join(parts)
    dtype = TORCH_TYPE[datatype]
    if not buffer:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raise ValueError(f"no data for shape {shape}")
        return tensor.to(device)
    if len(buffer) % ELEMENT_BYTES[datatype]:
        raise ValueError(f"{len(buffer)} bytes are no whole number of {datatype} elements")
    return on_device(torch.frombuffer(buffer, dtype=dtype).view(shape), device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device. The copy to a GPU is queued like a computation, and not waited for."""
    if device.type == "cpu":
        return tensor
    # From other memory than this, the driver waits until the GPU has done all that is queued.
    return tensor.pin_memory().to(device, non_blocking=True)


def raw_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row-major, as the wire wants them. A view: valid as long as it is referenced."""
    host = tensor.detach().cpu().resolve_neg().contiguous()
    storage = STORAGE_TYPE.get(host.dtype)
    if storage is not None:
        host = host.view(storage)
    return memoryview(cast("Any", host.numpy().reshape(-1))).cast("B") if host.numel() else memoryview(b"")
