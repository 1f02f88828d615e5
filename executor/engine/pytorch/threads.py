"""Sets how many threads a kernel may use. Torch keeps that number per thread, and one number for all future threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

_changing = Lock()


def use_threads(count: int) -> None:
    """From now on, kernels called on this thread use `count` threads. Other threads keep their number, and new threads
    get the number that they would have got. Cheap if nothing changes.
    """
    if torch.get_num_threads() == count:
        return
    with _changing, ThreadPoolExecutor(max_workers=1) as apart:
        # A new thread reads the number for future threads, and sets it back after this thread has changed it.
        for_new_threads = apart.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        apart.submit(torch.set_num_threads, for_new_threads).result()
