"""Sends finished spans through the OpenTelemetry SDK's exporters, behind a bound that never blocks.

Imported only when tracing is on. Spans are made as the SDK's `ReadableSpan`s and handed to its `BatchSpanProcessor`s,
without its tracers: their ids, parents and times are known already, and a span is never "current" anywhere.

The SDK's queue drops spans that do not fit, but logs each time. So the bound is kept here, and drops are only counted.
If a collector does not answer, two lines are logged: when spans begin to be lost, and when that is over.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from os import environ
from typing import Any

from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from shared.process import logs
from shared.traces.conventions import CONVENTIONAL
from shared.traces.spans import FinishedSpan, SpanName

QUEUE_SPANS = 8192
"""Spans that wait for the exporter, at most (OTEL_BSP_MAX_QUEUE_SIZE): about 1 s of a busy gateway, 10 MB."""
BATCH_SPANS = 512
"""Spans per export (OTEL_BSP_MAX_EXPORT_BATCH_SIZE)."""
ERROR_CHARACTERS_MAX = 1_000
"""Of an error's text in a span. Collectors take 4 MiB at once (gRPC's default): 8 KiB for each span of an export, and a
character may take four bytes. Attributes are names and numbers, and links have a bound (`tracing.LINKS_MAX`).
"""
DELAY_MS = 1000
"""Longest wait before an export (OTEL_BSP_SCHEDULE_DELAY); the SDK's 5 s are long for watching a running sequence."""

ABORT_S = 0.2
"""How long aborting an export may take after the time for the flush is over."""

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
OK = Status(StatusCode.UNSET)
KINDS: Mapping[str, SpanKind] = {
    SpanName.STEP: SpanKind.SERVER,
    SpanName.GATEWAY: SpanKind.PRODUCER,
    SpanName.BATCH: SpanKind.CONSUMER,
    SpanName.CHECKPOINT: SpanKind.CLIENT,
}
"""Kinds of spans by their names; the others have no part in another process: INTERNAL."""
EXPORTER_LOGGER = "opentelemetry.exporter"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first that is set counts."""


class Complaints(logging.Handler):
    """Takes the OTLP exporters' own log lines, one or more per attempt, and keeps the last one.

    It holds the reason of a failure, which these exporters only log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reason = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        self.reason = record.getMessage()


complaints = Complaints()
"""One for the process, because loggers belong to the process."""


class BoundedExporter(SpanExporter):
    """An exporter with a bound on the spans that wait for it. `admit` is called on one thread, `export` on another.

    lost   spans that were not sent: dropped at the bound, or refused by the collector
    """

    def __init__(self, exporter: SpanExporter, name: str, queue_spans: int) -> None:
        self._exporter = exporter
        self._name = name
        self._queue_spans = queue_spans
        self._lock = threading.Lock()
        self._waiting = 0
        self._failing = False
        self._closed = False
        self.lost = 0
        self._lost_before = 0

    def admit(self) -> bool:
        """Whether one more span may be queued; counts it."""
        with self._lock:
            if self._waiting >= self._queue_spans:
                self.lost += 1
                return False
            self._waiting += 1
            return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            with self._lock:
                self._waiting -= len(spans)
                if result is not SpanExportResult.SUCCESS:
                    self.lost += len(spans)
        self._judge(succeeded=result is SpanExportResult.SUCCESS)
        return result

    def _judge(self, *, succeeded: bool) -> None:
        # Only a change from sending to failing, or back, is logged.
        if self._closed or succeeded is not self._failing:
            return
        self._failing = not succeeded
        if self._failing:
            logs.warning("spans cannot be exported, they are dropped", exporter=self._name, reason=complaints.reason)
        else:
            logs.warning("spans are exported again", exporter=self._name, lost=self.lost - self._lost_before)
            self._lost_before = self.lost

    @property
    def unsent(self) -> int:
        """Spans that were lost, and those that wait."""
        with self._lock:
            return self.lost + self._waiting

    def shutdown(self) -> None:
        """Aborts the export that is under way. Safe to call twice: the SDK calls it too, once its thread has ended."""
        if self._closed:
            return
        self._closed = True
        self._exporter.shutdown()


class SdkSink:
    """Sends spans to one or more of the SDK's exporters."""

    def __init__(self, exporters: Mapping[str, SpanExporter], resource: Resource) -> None:
        queue_spans = _number("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS)
        self._resource = resource
        self._scope = InstrumentationScope("seqmesh", version("seqmesh"))
        self._exporters = [BoundedExporter(exporter, name, queue_spans) for name, exporter in exporters.items()]
        self._processors = [
            BatchSpanProcessor(
                exporter,
                max_queue_size=queue_spans,
                schedule_delay_millis=_number("OTEL_BSP_SCHEDULE_DELAY", DELAY_MS),
                max_export_batch_size=min(queue_spans, _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS)),
            )
            for exporter in self._exporters
        ]

    def emit(self, span: FinishedSpan) -> None:
        """Queues a span for every exporter that has room; drops and counts it for the others."""
        for exporter, processor in zip(self._exporters, self._processors, strict=True):
            if exporter.admit():
                processor.on_end(self._readable(span))

    @property
    def lost(self) -> int:
        """Spans that were not sent, over all exporters."""
        return sum(exporter.lost for exporter in self._exporters)

    def shutdown(self, timeout_s: float) -> None:
        """Flushes for at most `timeout_s`, then aborts the exports under way and leaves their daemon threads to end."""
        deadline = time.monotonic() + timeout_s
        # The SDK's shutdown waits up to 30 s for its thread and takes no bound; some exporters' shutdown waits for an
        # export.
        _run_until(deadline, [processor.shutdown for processor in self._processors])
        _run_until(deadline + ABORT_S, [exporter.shutdown for exporter in self._exporters])
        if unsent := sum(exporter.unsent for exporter in self._exporters):
            logs.warning("spans were lost", spans=unsent)

    def _readable(self, span: FinishedSpan) -> ReadableSpan:
        state = TraceState.from_header([span.trace_state]) if span.trace_state else None
        context = SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=SAMPLED, trace_state=state)
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=span.remote, trace_flags=SAMPLED)
        return ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            {**CONVENTIONAL.get(span.name, {}), **span.attributes},
            links=[Link(SpanContext(trace, one, is_remote=True, trace_flags=SAMPLED)) for trace, one in span.links],
            kind=KINDS.get(span.name, SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, span.error[:ERROR_CHARACTERS_MAX]) if span.error else OK,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _run_until(deadline: float, calls: Sequence[Callable[[], None]]) -> None:
    """Makes the calls at once, each on a daemon thread, and waits for them until the deadline (monotonic, s)."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def open_sink(names: Iterable[str], service: str, instance: str) -> SdkSink | None:
    """The exporters of these names, started; None when none of them is known or usable (which is logged)."""
    logger = logging.getLogger(EXPORTER_LOGGER)
    logger.propagate = False
    logger.addHandler(complaints)
    exporters = {name: exporter for name in names if (exporter := _exporter(name)) is not None}
    return SdkSink(exporters, resource_of(service, instance)) if exporters else None


def resource_of(service: str, instance: str) -> Resource:
    """The attributes of this process in every span. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over ours."""
    ours = {SERVICE_NAME: f"seqmesh-{service}", SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: version("seqmesh")}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _exporter(name: str) -> SpanExporter | None:
    if name == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    if name != "otlp":
        logs.warning("unknown exporter is ignored", OTEL_TRACES_EXPORTER=name, known="otlp, console, none")
        return None
    variable = next((name for name in PROTOCOL_VARIABLES if environ.get(name)), "")
    protocol = environ.get(variable, "grpc")
    # Imported by need: each brings a client library of its own.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as HttpSpanExporter,
        )

        return HttpSpanExporter()
    told: dict[str, Any] = {variable: protocol}
    logs.warning("unknown protocol, no spans are sent", **told, known="grpc, http/protobuf")
    return None


def _number(name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and int(text) > 0:
        return int(text)
    logs.warning("no positive number, the default is used", variable=name, value=text, default=default)
    return default
