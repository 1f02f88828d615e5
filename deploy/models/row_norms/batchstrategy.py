"""Bounds a batch by its volume: rows times the longest row, after padding, are at most the parameter MAX_VOLUME.

Triton's five hooks of custom batching, as a Python file. They add to the batcher's own rules and replace none: a
request that is larger than the bound still runs, alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Volume:
    """The rows and the longest row of a batch so far."""

    bound: int
    rows: int = 0
    longest: int = 0


def model_batcher_initialize(model: Any) -> int:
    """Called once per load; returns the bound. A parameter that is not a number fails the load."""
    return int(model.parameters["MAX_VOLUME"])


def model_batch_initialize(batcher: int) -> Volume:
    """Called for each new batch."""
    return Volume(batcher)


def model_batch_include_request(request: Any, batch: Volume) -> bool:
    """Whether the request still fits into the batch. If so, it counts as part of it."""
    rows, length = request.shape("VECTOR")
    batch.rows += rows
    batch.longest = max(batch.longest, length)
    return batch.rows * batch.longest <= batch.bound


def model_batch_finalize(batch: Volume) -> None:
    """Nothing is held."""


def model_batcher_finalize(batcher: int) -> None:
    """Nothing is held."""
