"""Makes the counts of one model version (triton-spec 5.7), packed for the commit or answer that carries them.

No count is kept here: Redis adds the counts up when the answer is final (`shared.statistics.tally`). Only the sizes of
the latest batches wait for the next report, and measurements for the next second (`executor.reporting.request_meter`).

Every request that a model fails comes by here, whatever its backend and however late its answer. So it is logged here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from executor.engine.base import RowError, RowResult
from executor.reporting.request_meter import RequestMeter
from shared.contract.errors import Code, sendable
from shared.process import logs
from shared.process.repeats import Repeats
from shared.statistics.metrics_config import FIRST_RESPONSE_BUCKETS_MS, MetricsConfig
from shared.statistics.tally import (
    FULL_LOGS,
    GAINED_ROWS,
    HELD_BATCHES,
    FailureReason,
    ModelLoad,
    Response,
    Timings,
    added,
    execution,
    failure,
    first_response,
    packed,
    packed_success,
    response_counts,
    sketches,
    success,
    unpacked,
)

DEFAULT = MetricsConfig()
BATCHES_REPORTED = 32
"""The latest batches that a report names; between two reports there may have been more."""
OF_MODEL = frozenset({Code.INTERNAL, Code.UNKNOWN})
"""Codes of errors that are the model's. With any other one the request is wrong, or the model has judged it."""


class StatisticsRecorder:
    """Makes the counts of one load of a model version.

    metrics    which latencies are counted beside the sums
    bounds_ms  of the histogram's buckets
    requests   measures the requests of the load
    """

    def __init__(
        self, load: ModelLoad, metrics: MetricsConfig = DEFAULT, bounds_ms: Sequence[float] = FIRST_RESPONSE_BUCKETS_MS
    ) -> None:
        self.load = load
        self.requests = RequestMeter()
        self._metrics = metrics
        self._bounds_ms = bounds_ms if metrics.histogram_latencies else ()
        self._latest: deque[int] = deque(maxlen=BATCHES_REPORTED)
        self._failures = Repeats()

    def take_batches(self) -> tuple[int, ...]:
        """Rows of the batches since the last call."""
        latest = tuple(self._latest)
        self._latest.clear()
        return latest

    def of(self, load: ModelLoad) -> StatisticsRecorder:
        """The same for another load."""
        return StatisticsRecorder(load, self._metrics, self._bounds_ms)

    def execution(
        self, *, batch_size: int, timings: Timings, ended_ns: int, null_rows: int = 0, gained: int | None = None
    ) -> bytes:
        """Counts of one run of the model.

        batch_size  with null rows, as Triton's backends report it
        ended_ns    wall clock
        gained      rows that the batch gained by waiting for them; None if it did not wait
        """
        self._latest.append(batch_size - null_rows)
        ended_ms = ended_ns // 1_000_000
        counts = execution(batch_size=batch_size, compute=timings, ended_ms=ended_ms, null_rows=null_rows)
        if gained is not None:
            counts |= {HELD_BATCHES: 1, GAINED_ROWS: gained}
        return packed(counts)

    def answered(
        self,
        row: RowResult | RowError,
        *,
        rows: int,
        arrived_ns: int,
        began_ns: int,
        ended_ns: int,
        timings: Timings,
        responses: Sequence[Response] = (),
    ) -> bytes:
        """Counts of one request whose row has run. rows: its own batch size. Times are wall clock: arrival at the
        gateway (whose clock may be ahead), begin and end of the batch. responses: of a decoupled model
        """
        total_ns = max(0, ended_ns - arrived_ns)
        of_responses = response_counts(responses) if responses else {}
        if isinstance(row, RowError):
            if row.code in OF_MODEL:
                self._tell(row)
            return packed({**failure(FailureReason.BACKEND, total_ns=total_ns), **of_responses})
        queue_ns = max(0, began_ns - arrived_ns)
        if not (self._metrics.summary_latencies or self._bounds_ms or responses):
            return packed_success(rows=rows, total_ns=total_ns, queue_ns=queue_ns, compute=timings)
        counts = success(rows=rows, total_ns=total_ns, queue_ns=queue_ns, compute=timings)
        if self._metrics.summary_latencies:
            counts |= sketches({"request": total_ns, "queue": queue_ns, **dict(timings.items())})
        if self._bounds_ms:
            first_ns = began_ns + responses[0].ns - arrived_ns if responses else total_ns
            counts |= first_response(max(0, first_ns), self._bounds_ms)
        return packed({**counts, **of_responses} if responses else counts)

    def _tell(self, failed: RowError) -> None:
        """Logs the load's first failure, and later ones at growing intervals, whatever they say: their texts may all be
        different. Those that lose a state are counted by themselves, because they are rare beside the others.
        """
        suppressed = self._failures.suppressed(failed.lost)
        if suppressed is not None:
            repeated: dict[str, Any] = {"repeated": suppressed} if suppressed else {}
            model, cause = self.load.model, sendable(failed.message)
            logs.warning("model failed", model=model, version=self.load.version, cause=cause, **repeated)

    def with_full_log(self, counts: bytes) -> bytes:
        """Adds to a request's counts that its sequence stopped being recoverable with its commit."""
        return packed({**unpacked(counts), FULL_LOGS: 1})

    def refused(self, reason: FailureReason, *, arrived_ns: int, now_ns: int) -> bytes:
        """Counts of one request that is answered without the model."""
        return packed(failure(reason, total_ns=max(0, now_ns - arrived_ns)))


def together(left: bytes, counts: bytes) -> bytes:
    """Packed counts, with those that were left before; b"" for none."""
    return packed(added((unpacked(left), unpacked(counts)))) if left else counts
