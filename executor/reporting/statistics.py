"""Counts of what one model version did (triton-spec 5.7), packed for the commit or answer that they travel with.

Nothing is kept here: what is counted is counted in Redis, with the answer (`shared.statistics.tally`).
"""

from __future__ import annotations

from collections.abc import Sequence

from executor.engine.base import RowError, RowResult, Timings
from shared.statistics.metrics_config import FIRST_RESPONSE_BUCKETS_MS, MetricsConfig
from shared.statistics.tally import (
    FULL_LOGS,
    Compute,
    FailureReason,
    ModelLoad,
    execution,
    failure,
    first_response,
    packed,
    sketches,
    success,
    unpacked,
)

DEFAULT = MetricsConfig()


class StatisticsRecorder:
    """Makes the counts of one load of a model version.

    metrics    which latencies are wanted beside sums
    bounds_ms  of the histogram's buckets
    """

    def __init__(
        self, load: ModelLoad, metrics: MetricsConfig = DEFAULT, bounds_ms: Sequence[float] = FIRST_RESPONSE_BUCKETS_MS
    ) -> None:
        self.load = load
        self._summaries = metrics.summary_latencies
        self._bounds_ms = bounds_ms if metrics.histogram_latencies else ()

    def of(self, load: ModelLoad) -> StatisticsRecorder:
        """The same for another load."""
        other = StatisticsRecorder(load)
        other._summaries, other._bounds_ms = self._summaries, self._bounds_ms
        return other

    def execution(self, *, batch_size: int, timings: Timings, ended_ns: int) -> bytes:
        """One run of the model. batch_size counts null rows too, as Triton's backends report it; wall clock."""
        return packed(execution(batch_size=batch_size, compute=compute_of(timings), ended_ms=ended_ns // 1_000_000))

    def answered(
        self, row: RowResult | RowError, *, rows: int, arrived_ns: int, began_ns: int, ended_ns: int, timings: Timings
    ) -> bytes:
        """One request whose row has run. rows: its own batch size; times are wall clock: arrival at the gateway (whose
        clock may be ahead), begin and end of the batch."""
        total_ns = max(0, ended_ns - arrived_ns)
        if isinstance(row, RowError):
            return packed(failure(FailureReason.BACKEND, total_ns=total_ns))
        queue_ns = max(0, began_ns - arrived_ns)
        compute = compute_of(timings)
        counts = success(rows=rows, total_ns=total_ns, queue_ns=queue_ns, compute=compute)
        if self._summaries:
            counts |= sketches({"request": total_ns, "queue": queue_ns, **dict(compute.items())})
        if self._bounds_ms:
            counts |= first_response(total_ns, self._bounds_ms)
        return packed(counts)

    def with_full_log(self, counts: bytes) -> bytes:
        """One request with whose commit its sequence stopped to be recoverable."""
        return packed({**unpacked(counts), FULL_LOGS: 1})

    def refused(self, reason: FailureReason, *, arrived_ns: int, now_ns: int) -> bytes:
        """One request that is answered without the model."""
        return packed(failure(reason, total_ns=max(0, now_ns - arrived_ns)))


def compute_of(timings: Timings) -> Compute:
    """An engine's times as they are counted."""
    return Compute(timings.compute_input_ns, timings.compute_infer_ns, timings.compute_output_ns)
