"""Counts of what one model version did (triton-spec 5.7), packed for the commit or answer that they travel with.

Nothing is kept here: what is counted is counted in Redis, with the answer (`shared.tally`).
"""

from __future__ import annotations

from executor.engine.base import RowError, RowResult, Timings
from shared.tally import Compute, Load, Reason, execution, failure, packed, success


class ModelStatistics:
    """Makes the counts of one load of a model version."""

    def __init__(self, load: Load) -> None:
        self.load = load

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
            return packed(failure(Reason.BACKEND, total_ns=total_ns))
        queue_ns = max(0, began_ns - arrived_ns)
        return packed(success(rows=rows, total_ns=total_ns, queue_ns=queue_ns, compute=compute_of(timings)))

    def refused(self, reason: Reason, *, arrived_ns: int, now_ns: int) -> bytes:
        """One request that is answered without the model."""
        return packed(failure(reason, total_ns=max(0, now_ns - arrived_ns)))


def compute_of(timings: Timings) -> Compute:
    """An engine's times as they are counted."""
    return Compute(timings.compute_input_ns, timings.compute_infer_ns, timings.compute_output_ns)
