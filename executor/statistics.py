"""Counts of what a model did (triton-spec 5.7), added up in Redis over all executors.

Counted here per batch, sent as increments a few times a second: the mesh's sum is exact but for the last fraction of
a second of an executor that was killed, or of one that lost its connection while sending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from executor.engine.base import RowError, RowResult, Timings
from shared.keyspace import Keyspace

LAST_INFERENCE = "last_inference_ms"


class ModelStatistics:
    """Counters of one model version since the last flush. Field names are those of the hash in Redis."""

    def __init__(self, model: str, version: str) -> None:
        self.model = model
        self.version = version
        self._counts: Counter[str] = Counter()
        self._last_inference_ms = 0

    def execution(self, *, batch_size: int, timings: Timings) -> None:
        """One run of the model. batch_size counts null rows too, as Triton's backends report it."""
        counts = self._counts
        counts["execution_count"] += 1
        counts[f"batch:{batch_size}:count"] += 1
        for part, ns in self._parts(timings):
            counts[f"batch:{batch_size}:{part}_ns"] += ns

    def answered(
        self, row: RowResult | RowError, *, rows: int, arrived_ns: int, began_ns: int, ended_ns: int, timings: Timings
    ) -> None:
        """One request whose row has run. rows: its own batch size; times are wall clock: arrival at the gateway (whose
        clock may be ahead), begin and end of the batch."""
        total_ns = max(0, ended_ns - arrived_ns)
        if isinstance(row, RowError):
            self.failure(total_ns=total_ns, reason="BACKEND")
            return
        queue_ns = max(0, began_ns - arrived_ns)
        self.success(rows=rows, total_ns=total_ns, queue_ns=queue_ns, timings=timings, now_ms=ended_ns // 1_000_000)

    def success(self, *, rows: int, total_ns: int, queue_ns: int, timings: Timings, now_ms: int) -> None:
        """One request answered; rows is its own batch size."""
        counts = self._counts
        counts["success_count"] += 1
        counts["success_ns"] += total_ns
        counts["queue_count"] += 1
        counts["queue_ns"] += queue_ns
        counts["inference_count"] += rows
        for part, ns in self._parts(timings):
            counts[f"{part}_count"] += 1
            counts[f"{part}_ns"] += ns
        self._last_inference_ms = max(self._last_inference_ms, now_ms)

    def failure(self, *, total_ns: int, reason: str) -> None:
        """One request that got an error. reason: REJECTED, CANCELED, BACKEND or OTHER (triton-spec 7)."""
        self._counts["fail_count"] += 1
        self._counts["fail_ns"] += total_ns
        self._counts[f"fail_{reason}"] += 1

    def take(self, keys: Keyspace) -> list[Sequence[Any]]:
        """Takes what was counted since the last time, as commands that add it to the mesh's sums."""
        if not self._counts:
            return []
        counts, self._counts = self._counts, Counter()
        name = keys.stats(self.model, self.version)
        commands: list[Sequence[Any]] = [("HINCRBY", name, field, value) for field, value in counts.items()]
        if self._last_inference_ms:
            commands.append(("HSET", name, LAST_INFERENCE, self._last_inference_ms))
        return commands

    @staticmethod
    def _parts(timings: Timings) -> tuple[tuple[str, int], ...]:
        return (
            ("compute_input", timings.compute_input_ns),
            ("compute_infer", timings.compute_infer_ns),
            ("compute_output", timings.compute_output_ns),
        )
