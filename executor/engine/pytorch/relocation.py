"""Where in memory a tensor lies: kernels may choose their instructions by it."""

from __future__ import annotations

import mmap

import numpy as np
import torch


def relocated(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A copy that begins so many bytes behind the beginning of a page, with the same strides; the tensor itself where
    it shows only a part of what others may write.

    offset_bytes  a multiple of 64, less than a page
    """
    if tensor.is_sparse or tensor.is_quantized or tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor
    room = np.empty(tensor.nbytes + 2 * mmap.PAGESIZE, np.uint8)
    begin = -room.ctypes.data % mmap.PAGESIZE + offset_bytes
    # By way of numpy the storage is the part alone, and a tensor that was moved can be moved again.
    flat = torch.from_numpy(room[begin : begin + tensor.nbytes]).view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor)
