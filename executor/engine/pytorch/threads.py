"""How many threads a kernel may use: torch keeps that per thread, and for threads to come in one number for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

_changing = Lock()


def use_threads(count: int) -> None:
    """From now on, kernels called on this thread use so many. Other threads keep theirs, and new ones get what they
    would have got; cheap when nothing changes."""
    if torch.get_num_threads() == count:
        return
    with _changing, ThreadPoolExecutor(max_workers=1) as apart:
        for_new_threads = apart.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        apart.submit(torch.set_num_threads, for_new_threads).result()
