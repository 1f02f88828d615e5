"""The smallest backend that keeps a state: the running sum of a sequence's inputs, each times the model's weight.

A model's file is `model.weighted_sum`, a number. Written by the recipe in docs/design/where.md, "How to add a backend".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from executor.engine.base import BatchResult, LoadRequest, Row, RowError, RowResult, Timings
from shared.contract.errors import Code, LoadError
from shared.contract.tensors import Tensor, described, from_numpy, to_numpy


class WeightedSumEngine:
    """One loaded instance."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._sums: dict[int, float] = {}

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        began_ns = time.perf_counter_ns()
        results = [self._step(row, wanted=wanted) for row, wanted in zip(rows, want_state, strict=True)]
        return BatchResult(results, Timings(0, time.perf_counter_ns() - began_ns, 0))

    def _step(self, row: Row, *, wanted: bool) -> RowResult | RowError | None:
        if row.null:
            return None
        value = to_numpy(row.inputs["INPUT"]).item()
        if value != value:  # noqa: PLR0124 - NaN alone is not itself
            return RowError(Code.INTERNAL, "INPUT is not a number")
        before = 0.0 if row.start or row.slot is None else self._sums[row.slot]
        total = before + self._weight * value
        if row.slot is not None:
            self._sums[row.slot] = total
        output = from_numpy("OUTPUT", np.full((1, 1), total, np.float32))
        return RowResult([output], self._states(total) if wanted else {})

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        for slot, one in zip(slots, states, strict=True):
            self._sums[slot] = to_numpy(one["SUM_IN"]).item()

    def describe_state(self, slot: int) -> str:
        return described(self._states(self._sums.get(slot, 0.0)))

    def drop_state(self, slot: int) -> None:
        self._sums.pop(slot, None)

    def close(self) -> None:
        self._sums.clear()

    def _states(self, total: float) -> dict[str, Tensor]:
        return {"SUM_IN": from_numpy("SUM_IN", np.full(1, total, np.float64))}


class WeightedSumBackend:
    """What `backend: "weighted_sum"` names."""

    name = "weighted_sum"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        return config_json

    def load(self, request: LoadRequest) -> WeightedSumEngine:
        path = request.model_dir / request.version / "model.weighted_sum"
        try:
            return WeightedSumEngine(float(path.read_text()))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}: {error}") from error
