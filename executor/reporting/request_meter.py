"""Measures the requests of one load of a model version: the phases that pass here, how steps went, checkpoints.

Called for every step, so each method does a few additions and nothing else. What was measured leaves with the process's
other measurements, once a second (`shared.store.metering`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.statistics.meter import (
    BATCH_ROWS,
    CHECKPOINT_BYTES,
    CHECKPOINTS,
    REPLAYED_STEPS,
    ROW_BOUNDS,
    STEP_OUTCOME,
    LoadMeter,
    Phase,
)
from shared.store.script_values import CommitCode, StepCommit, StepOutcome

OUTCOMES = {outcome: f"{STEP_OUTCOME}{outcome.name.lower()}" for outcome in StepOutcome}
DONE = StepOutcome.DONE


class RequestMeter:
    """meter: what was measured of the load"""

    def __init__(self) -> None:
        self.meter = LoadMeter()
        self._rows = self.meter.distribution(BATCH_ROWS, ROW_BOUNDS)
        self._schedule, self._queue, self._compute, self._checkpoint = map(
            self.meter.phase, (Phase.SCHEDULE, Phase.QUEUE, Phase.COMPUTE, Phase.CHECKPOINT)
        )

    def batch(self, rows: int, replayed: int = 0) -> None:
        """A batch has run. rows: without null rows; replayed: steps of it that ran for their state alone"""
        self._rows.add(rows)
        if replayed:
            self.meter.counts[REPLAYED_STEPS] += replayed

    def computed(self, requests: int, began_ns: int, ended_ns: int) -> None:
        """So many requests have run together; `ran` follows for each."""
        self._compute.add(ended_ns - began_ns, requests)

    def ran(self, arrived_ns: int, delivered_ns: int, began_ns: int, ended_ns: int, trace: str) -> None:
        """A request has run. Wall clock, as of its spans; delivered_ns: when it came into its owner's inbox, 0 for a
        request of no sequence; trace: of its span, "" for none.
        """
        waited_ns = began_ns - (delivered_ns or arrived_ns)
        self._queue.add(waited_ns)
        if delivered_ns:
            self._schedule.add(delivered_ns - arrived_ns)
        if trace:
            self._queue.show(waited_ns, trace, began_ns)
            self._compute.show(ended_ns - began_ns, trace, ended_ns)
            if delivered_ns:
                self._schedule.show(delivered_ns - arrived_ns, trace, delivered_ns)

    def committed(self, steps: Sequence[StepCommit], codes: Sequence[CommitCode], sent_ns: int, done_ns: int) -> None:
        """Redis has answered to these commits. Wall clock."""
        took_ns, counts, final, other, saved, size = done_ns - sent_ns, self.meter.counts, 0, 0, 0, 0
        for step, code in zip(steps, codes, strict=True):
            # Refused, or out of order: it is not final.
            if code < 0:
                continue
            final += 1
            if step.outcome is not DONE:
                other += 1
                counts[OUTCOMES[step.outcome]] += 1
            if step.checkpoint:
                saved += 1
                for _, value in step.checkpoint:
                    size += len(value)
            if step.traceparent:
                self._checkpoint.show(took_ns, step.traceparent, done_ns)
        if final:
            self._checkpoint.add(took_ns, final)
            counts[OUTCOMES[DONE]] += final - other
        if saved:
            counts[CHECKPOINTS] += saved
            counts[CHECKPOINT_BYTES] += size
