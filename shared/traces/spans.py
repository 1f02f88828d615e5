"""A span as the mesh records it: finished, with ids of its own; and where it goes. Knows nothing of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

AttributeValue = str | bool | int | float


class SpanName(StrEnum):
    START = "sequence.start"
    STEP = "step"
    BATCH = "batch"
    GATEWAY = "gateway"
    SCHEDULE = "schedule"
    QUEUE = "queue"
    COMPUTE = "compute"
    CHECKPOINT = "checkpoint"
    REPLY = "reply"
    TAKEOVER = "sequence.takeover"
    PAGED_IN = "sequence.paged_in"
    EXPIRED = "sequence.expired"
    END = "sequence.end"


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """One span, over and done, as it goes to the exporter.

    parent_id   0 for a root span
    remote      the parent was recorded by another process
    links       (trace id, span id) each
    start_ns, end_ns  wall clock; an end before its start (it was set back, or hosts' clocks differ) is moved to it
    error       "" for success
    trace_state the client's, for a span in the client's trace
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    links: Sequence[tuple[int, int]] = ()
    error: str = ""
    remote: bool = False
    trace_state: str = ""

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            object.__setattr__(self, "end_ns", self.start_ns)


class SpanSink(Protocol):
    """Where finished spans go. `emit` never blocks and never raises; `shutdown` flushes for at most `timeout_s`."""

    def emit(self, span: FinishedSpan) -> None: ...

    def shutdown(self, timeout_s: float) -> None: ...
