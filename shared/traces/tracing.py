"""What the mesh records about a request and a sequence, as OpenTelemetry spans.

There is one trace per sequence. Its ids follow from the sequence id (`shared.traces.context`), so that it can be looked
up from the first step on. Spans are recorded when they are over, with their real times, and are sent at once: the trace
of a running sequence is complete up to its last step.

    sequence.start            root span; short, recorded when the START was accepted             gateway
    ├── step                  one per request, from its arrival to its answer                    gateway
    │   ├── gateway           arrival -> accepted by Redis                                       gateway
    │   ├── schedule          accepted -> in its owner's inbox (waits for a slot or a takeover)  executor
    │   ├── queue             in the inbox -> its batch begins                                   executor
    │   ├── compute           its batch, in the model                                            executor
    │   ├── checkpoint        the commit: state, step number and reply into Redis                executor
    │   └── reply             the reply came back -> the caller has it                           gateway
    ├── sequence.takeover     a new owner was chosen                                             scheduler
    ├── sequence.paged_in     the wait for a slot of a sequence that had given its own up        scheduler
    ├── sequence.expired      idle too long                                                      scheduler
    └── sequence.end          the END was committed; to an ensemble: answered                    executor, gateway
    batch                     a batch of steps of any sequences: a trace of its own              executor

A batch's span links to the steps that it ran, and the `compute` of each of them to it. Links lead across executors: a
new owner's first `compute` links to its `sequence.takeover` (whose id follows from sequence and epoch) and to the last
committed step, whose context the checkpoint carries. Links also lead to clients: a sequence has one trace but many
callers, so the context that a client sends with a step becomes a link of that step's span, and its trace id an
attribute. A request of no sequence has only one caller: there the client's context is the parent, and the span belongs
to the client's trace.

Runs of one correlation id share the trace, each with a `sequence.start` of its own. The first step of a record is the
root; a START that continues a live record is a child of it with an id of its own. If an id is used again after its
tombstone is gone or replaced, the root is recorded again, with the same id and new times: the gateway cannot know of
the earlier run, and the steps of both runs must find their parent.

A request to an ensemble is a `step` too, of the ensemble's sequence if one of its steps keeps state. The requests to
its models are `step` spans below it, in its trace. Those of sequences link to the roots of their own traces, which tell
of their takeovers and of those that expire.

The mesh's trace settings may change this while it runs (`shared.traces.control`): rates, counts, single models.

The decision comes first: nothing is built for a trace that is not recorded. If tracing is off, or the trace is not
sampled, `begin_step` returns one shared object that does nothing; its traceparent is "", and with a "" parent `record`
returns at once. Tracing is off unless a variable of the OpenTelemetry standard asks for it; only then is its SDK
imported. A slow or dead collector is never waited for.

Attributes are named `seqmesh.<name>`, after the keyword that they were given by; `shared.traces.conventions` adds those
of OpenTelemetry's semantic conventions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.contract.endpoints import Endpoint
from shared.contract.ids import Epoch, SequenceId, model_of
from shared.process import logs
from shared.traces import context
from shared.traces.control import TraceControl
from shared.traces.conventions import ENDPOINTS, ERROR_TYPE
from shared.traces.spans import AttributeValue, FinishedSpan, SpanName, SpanSink

LINKS_MAX = 128
"""Links of a batch's span: the bound that OpenTelemetry's SDKs have for the links of a span."""
SHUTDOWN_TIMEOUT_S = 3.0
"""How long the last spans may take to be sent, at a graceful stop."""


class StepSpan:
    """A request's span while the request is under way. This class itself, which does nothing, is for a request that is
    not sampled.

    traceparent  travels with the request, so that executors can record children; "" if the request is not sampled
    """

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        return ""

    def accepted(self, step: int, *, repeated: bool = False, at_ns: int = 0) -> None:
        """Redis has accepted the request. Records `gateway`, and `sequence.start` if a run began with it.

        step      its number in the sequence's record, from 1; 0 for a request of no sequence
        repeated  it is a retry of a step that was accepted before
        at_ns     when, wall clock; 0 for now
        """

    def replied(self) -> None:
        """The reply has reached the gateway: the time from here on belongs to `reply`."""

    def end(self, error: str = "", error_type: str = "") -> None:
        """The caller has its answer. Records `step` and `reply`; further calls do nothing.

        error, error_type  what went wrong, in words and by its code; "" for success
        """


NO_STEP = StepSpan()


@dataclass(slots=True, eq=False)
class RecordedStep(StepSpan):
    """The span of a request that is sampled. Its fields belong to the methods of this class.

    of_ensemble  its children are the requests to the ensemble's models
    root         trace and span of its sequence's beginning; None for a request of no sequence, and where that trace is
                 not sampled
    """

    sink: SpanSink
    sequence: SequenceId | None
    model: str
    start: bool
    client: context.ClientContext | None
    trace_id: int
    parent_id: int
    begin_ns: int
    of_ensemble: bool = False
    root: tuple[int, int] | None = None
    span_id: int = field(default_factory=context.new_span_id)
    accepted_ns: int = 0
    replied_ns: int = 0
    ended: bool = False
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    def __post_init__(self) -> None:
        self.attributes["seqmesh.model"] = self.model
        if self.sequence is not None:
            self.attributes["seqmesh.sequence"] = self.sequence
            if self.client is not None:
                self.attributes["seqmesh.client_trace_id"] = f"{self.client.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return context.traceparent(self.trace_id, self.span_id)

    def accepted(self, step: int, *, repeated: bool = False, at_ns: int = 0) -> None:
        self.accepted_ns = at_ns or time.time_ns()
        # The answer may be faster than what Redis says of the step: then the spans have been recorded, and another
        # thread reads their attributes.
        if not self.ended:
            if not self.of_ensemble:
                self._child(SpanName.GATEWAY, self.begin_ns, self.accepted_ns)
            if step:
                self.attributes["seqmesh.step"] = step
            if repeated:
                self.attributes["seqmesh.repeated"] = True
        if not repeated and self.sequence is not None and self.root is not None and (self.start or step == 1):
            self._record_start(self.sequence, self.root, step)

    def replied(self) -> None:
        self.replied_ns = time.time_ns()

    def end(self, error: str = "", error_type: str = "") -> None:
        if self.ended:
            return
        self.ended = True
        now_ns = time.time_ns()
        if not self.accepted_ns and not self.of_ensemble:
            self._child(SpanName.GATEWAY, self.begin_ns, now_ns)
        if self.replied_ns:
            self._child(SpanName.REPLY, self.replied_ns, now_ns)
        if error_type:
            self.attributes[ERROR_TYPE] = error_type
        self._record_step(now_ns, error)

    def _record_step(self, end_ns: int, error: str) -> None:
        client, in_sequence = self.client, self.sequence is not None
        links = [(client.trace_id, client.span_id)] if client is not None and in_sequence else []
        if self.root is not None and self.root[0] != self.trace_id:
            links.append(self.root)
        self.sink.emit(
            FinishedSpan(
                name=SpanName.STEP,
                trace_id=self.trace_id,
                span_id=self.span_id,
                parent_id=self.parent_id,
                start_ns=self.begin_ns,
                end_ns=end_ns,
                attributes=self.attributes,
                links=links,
                error=error,
                # The root was recorded by the gateway of the START, which may have been another one.
                remote=self.parent_id != 0,
                trace_state=client.trace_state if client is not None and not in_sequence else "",
            )
        )

    def _record_start(self, sequence: SequenceId, root: tuple[int, int], step: int) -> None:
        """Records the root span; if the run continues a live record, a child of the root."""
        trace_id, root_id = root
        span_id, parent_id = (root_id, 0) if step <= 1 else (context.new_span_id(), root_id)
        attributes = prefixed({"model": self.model, "sequence": sequence, "step": step})
        start_ns, end_ns = self.begin_ns, self.accepted_ns
        self.sink.emit(
            FinishedSpan(
                SpanName.START, trace_id, span_id, parent_id, start_ns, end_ns, attributes, remote=parent_id != 0
            )
        )

    def _child(self, name: SpanName, start_ns: int, end_ns: int) -> None:
        self.sink.emit(FinishedSpan(name, self.trace_id, context.new_span_id(), self.span_id, start_ns, end_ns, {}))


class Tracing:
    """Records the spans of a service. Without a sink it is off, and every method returns at once.

    Methods may be called from any thread.
    """

    def __init__(self, sink: SpanSink | None = None, sampler: context.Sampler | None = None) -> None:
        self._sink = sink
        self.control = TraceControl(sampler or context.Sampler(), exporting=sink is not None)
        self.enabled = sink is not None

    def begin_step(
        self,
        sequence: SequenceId | None,
        model: str,
        *,
        start: bool,
        trace_headers: Mapping[str, str],
        arrived_ns: int = 0,
        endpoint: Endpoint = Endpoint.MODEL_INFER,
        of_ensemble: bool = False,
        within: str | None = None,
    ) -> StepSpan:
        """The span of a request that has arrived at a gateway; to be ended with `StepSpan.end`.

        sequence       None for a request of no sequence
        start          the client set START (a run that begins without START is recognised by `StepSpan.accepted`)
        trace_headers  the client's `traceparent` and `tracestate`, by lower-case name; {} if it sent none
        arrived_ns     wall clock; 0 for now
        endpoint       by which way it came; a step of an ensemble came by none
        of_ensemble    the request is one to an ensemble
        within         of a step of an ensemble: traceparent of the whole request's span, "" if that is not recorded
        returns        the shared `NO_STEP` if tracing is off or the trace is not sampled
        """
        sink = self._sink
        if sink is None:
            return NO_STEP
        root = (
            (context.sequence_trace_id(sequence), context.sequence_root_id(sequence)) if sequence is not None else None
        )
        if within is not None:
            if not within:
                return NO_STEP
            client = None
            trace_id, parent_id = context.parse(within)
            if root is not None and not self.control.sampler(model).samples(root[0]):
                root = None
        elif root is not None:
            trace_id, parent_id = root
            if not self.control.sampler(model).samples(trace_id):
                return NO_STEP
            client = context.client_context(trace_headers) if trace_headers else None
        else:
            client = context.client_context(trace_headers) if trace_headers else None
            trace_id = client.trace_id if client is not None else context.new_trace_id()
            if not self.control.sampler(model).samples_request(trace_id, client):
                return NO_STEP
            parent_id = client.span_id if client is not None else 0
        if within is None and not self.control.take(model):
            return NO_STEP
        return RecordedStep(
            sink,
            sequence=sequence,
            model=model,
            start=start,
            client=client,
            trace_id=trace_id,
            parent_id=parent_id,
            begin_ns=arrived_ns or time.time_ns(),
            attributes=dict(ENDPOINTS[endpoint]) if within is None else {},
            of_ensemble=of_ensemble,
            root=root,
        )

    def record(
        self,
        parent: str,
        name: str,
        start_ns: int,
        end_ns: int,
        links: Sequence[str] = (),
        error: str = "",
        *,
        span_id: int = 0,
        **attributes: AttributeValue,
    ) -> str:
        """Records a span that is over, under a parent that may have been recorded elsewhere.

        parent    traceparent; "" makes this a no-op
        start_ns, end_ns  wall clock
        links     traceparents; empty ones are left out
        error     why it failed, "" for success
        span_id   0 for a random one
        returns   the span's own traceparent, "" when nothing was recorded
        """
        trace_id, parent_id = context.parse(parent) if self._sink is not None and parent else (0, 0)
        if self._sink is None or not trace_id:
            return ""
        span_id = span_id or context.new_span_id()
        self._sink.emit(
            FinishedSpan(
                name=name,
                trace_id=trace_id,
                span_id=span_id,
                parent_id=parent_id,
                start_ns=start_ns,
                end_ns=end_ns,
                attributes=prefixed(attributes),
                links=[context.parse(link) for link in links if link],
                error=error,
                remote=parent_id != 0,
            )
        )
        return context.traceparent(trace_id, span_id)

    def record_of_sequence(
        self,
        sequence: SequenceId,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        span_id: int = 0,
        **attributes: AttributeValue,
    ) -> str:
        """As `record`, of a span below the sequence's root: it names the sequence and its model."""
        model = model_of(sequence)
        if self._sink is None or not self.control.sampler(model).samples(context.sequence_trace_id(sequence)):
            return ""
        root, times = context.sequence_traceparent(sequence), (start_ns, end_ns)
        return self.record(root, name, *times, (), "", span_id=span_id, model=model, sequence=sequence, **attributes)

    def record_batch(
        self, steps: Sequence[str], start_ns: int, end_ns: int, *, batch_size: int, **attributes: AttributeValue
    ) -> str:
        """Records a batch that has run, in a trace of its own, with links to the steps that it ran.

        A batch runs steps of many sequences, and so of many traces: it is a child of none of them.

        steps       traceparents of those that are recorded; at most `LINKS_MAX` of them are linked
        batch_size  rows, whether recorded or not
        returns     the span's traceparent, to which the steps' `compute` links; "" if nothing was recorded
        """
        if not steps:
            return ""
        parent, name, links = context.traceparent(context.new_trace_id(), 0), SpanName.BATCH, steps[:LINKS_MAX]
        return self.record(parent, name, start_ns, end_ns, links, "", span_id=0, batch_size=batch_size, **attributes)

    def record_takeover(
        self,
        sequence: SequenceId,
        epoch: Epoch,
        start_ns: int,
        end_ns: int,
        name: SpanName = SpanName.TAKEOVER,
        **attributes: AttributeValue,
    ) -> str:
        """Records that a sequence was given to a new owner, whose spans link to `takeover_traceparent`.

        epoch     the new owner's
        start_ns  when the takeover began (the old owner's lease was seen to have ended)
        name      TAKEOVER; or PAGED_IN: the sequence was paged, and began to wait for an owner at `start_ns`
        returns   the span's traceparent, "" if nothing was recorded
        """
        span_id = context.takeover_id(sequence, epoch)
        return self.record_of_sequence(sequence, name, start_ns, end_ns, span_id=span_id, epoch=epoch, **attributes)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Sends the spans that are still queued, for at most `timeout_s` seconds, and ends the exporter's thread.
        Blocks.

        Nothing is recorded afterwards. Safe to call twice.
        """
        sink, self._sink = self._sink, None
        self.enabled = False
        if sink is not None:
            sink.shutdown(timeout_s)


def prefixed(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Attributes by the names under which they are exported."""
    return {f"seqmesh.{name}": value for name, value in attributes.items()}


def entry_time_ns(entry: str, after_ns: int, before_ns: int) -> int:
    """Wall clock of Redis at which a stream entry was added, nanoseconds. The entry's id says the millisecond; of that
    it is the middle of what lies between `after_ns` and `before_ns`, so a mean of many is right. The begin of the
    millisecond if nothing lies between them, because the clocks of hosts differ.
    """
    begin_ns = int(entry.partition("-")[0]) * 1_000_000
    first_ns, last_ns = max(begin_ns, after_ns), min(begin_ns + 999_999, before_ns)
    return (first_ns + last_ns) // 2 if first_ns <= last_ns else begin_ns


def setup(service: str, instance: str) -> Tracing:
    """Tracing as the OTEL_ variables of this process ask for it; off when they do not.

    service   "gateway", "scheduler" or "executor": the service's name is `seqmesh-<service>` unless OTEL_SERVICE_NAME
              or OTEL_RESOURCE_ATTRIBUTES says otherwise
    instance  the process's name: `service.instance.id`

    On when OTEL_TRACES_EXPORTER names `otlp` or `console`, or an OTLP endpoint is set (OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT); never when OTEL_SDK_DISABLED is true. What is wrong in the variables is logged
    and ignored, as the standard asks: a mesh serves without traces rather than not at all.
    """
    exporters = exporters_from(os.environ)
    if not exporters:
        return Tracing()
    try:
        # The SDK costs 100 ms and 20 MB: a mesh that is not traced does not even import it.
        from shared.traces.export import open_sink  # noqa: PLC0415

        sink = open_sink(exporters, service, instance)
    except Exception as error:  # noqa: BLE001 - of any class: the SDK and its exporters read the variables themselves
        logs.warning("variables of tracing are refused, no spans are sent", cause=f"{type(error).__name__}: {error}")
        return Tracing()
    return Tracing(sink, context.sampler_from(os.environ)) if sink is not None else Tracing()


def exporters_from(environment: Mapping[str, str]) -> list[str]:
    """Names of the exporters that the environment asks for, in its order; empty: tracing is off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    named = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if named:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "none")]
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return ["otlp"] if any(environment.get(name, "").strip() for name in endpoints) else []
