"""This machine's GPUs, as torch knows them."""

from __future__ import annotations

import torch


def gpu_count() -> int:
    """Usable CUDA devices; 0 when the driver does not answer."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_problem(index: int) -> str:
    """Why a GPU computes nothing more for this process, in one line; "" if it still does, or was never used.

    Waits until the GPU is idle. After a kernel has gone wrong (an index out of range, a memory fault, the hardware) its
    process has no GPU any more: every later call fails, whatever it is, until the process ends.
    Source: CUDA Runtime API, error types (cudaErrorAssert, cudaErrorIllegalAddress: "the process must be terminated").
    """
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
