"""What torch knows of this machine's GPUs."""

from __future__ import annotations

import torch


def gpu_count() -> int:
    """Usable CUDA devices; 0 when the driver does not answer."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_problem(index: int) -> str:
    """Why a GPU computes nothing more for this process, in a line; "" while it does, or was never used.

    Waits for what the GPU computes at the moment. A kernel that went wrong (an index out of range, a memory fault, the
    hardware) leaves its process without a GPU: every later call fails, whatever it is, until the process ends.
    Source: CUDA Runtime API, error types (cudaErrorAssert, cudaErrorIllegalAddress: "the process must be terminated").
    """
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
