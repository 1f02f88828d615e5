"""Bounds a batch by its volume: the elements of INPUT, over all of its requests, at most the parameter MAX_VOLUME.

Where rows are padded to the longest, a bound by volume instead of by rows lets short requests run many at a time and
long ones few. It is Triton's own example of custom batching, as a Python file.
"""

from __future__ import annotations

import math
from typing import Any


def model_batcher_initialize(model: Any) -> int:
    """Once per load: the bound. A parameter that is no number fails the load."""
    return int(model.parameters["MAX_VOLUME"])


def model_batch_initialize(batcher: int) -> dict[str, int]:
    """A new batch: what is left of the bound."""
    return {"left": batcher}


def model_batch_include_request(request: Any, batch: dict[str, int]) -> bool:
    """Whether the request still fits. The first one runs whatever is said of it."""
    batch["left"] -= math.prod(request.shape("INPUT"))
    return batch["left"] >= 0


def model_batch_finalize(batch: dict[str, int]) -> None:
    """Nothing is held."""


def model_batcher_finalize(batcher: int) -> None:
    """Nothing is held."""
