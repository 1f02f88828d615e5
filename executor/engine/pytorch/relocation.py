"""Moves a tensor in memory, because kernels may choose their instructions by the address."""

from __future__ import annotations

import mmap

import numpy as np
import torch


def relocated(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A copy that begins `offset_bytes` behind the beginning of a page, with the same strides. A tensor that shows only
    a part of its memory is returned as it is, because other tensors may write to that memory.

    offset_bytes  a multiple of 64, less than a page
    """
    if tensor.is_sparse or tensor.is_quantized or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor
    buffer = np.empty(tensor.nbytes + 2 * mmap.PAGESIZE, np.uint8)
    begin = -buffer.ctypes.data % mmap.PAGESIZE + offset_bytes
    # Through numpy the storage is this part alone, so that a moved tensor can be moved again.
    flat = torch.from_numpy(buffer[begin : begin + tensor.nbytes]).view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor)
