"""What torch knows of this machine's GPUs."""

from __future__ import annotations

import torch


def gpu_count() -> int:
    """Usable CUDA devices; 0 when the driver does not answer."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
