"""The leaky sum, a model that each runtime has in a file of its own: how it is configured, and its steps."""

from __future__ import annotations

from typing import Any

from executor.engine.base import Row
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from tests.executor.engine.model_workshop import sequence_config, wire


def leaky_config(backend: str, *, direct: bool = False, max_batch_size: int = 8, **changed: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "inputs": [TensorSpec("x", "FP32", (3,)), TensorSpec("index", "INT64", (1,))],
        "outputs": [TensorSpec("y", "FP32", (3,))],
        "states": [StateSpec("s", "s_next", "FP32", (3,))],
        **changed,
    }
    return sequence_config("leaky", backend, direct=direct, max_batch_size=max_batch_size, **given)


def leaky_row(slot: int, step: int = 0, index: int = 0) -> Row:
    x, at = wire("x", [[slot / 7 + step / 8, -slot, step]]), wire("index", [[index]], "<i8")
    return Row({"x": x, "index": at}, slot=slot, start=step == 0)
