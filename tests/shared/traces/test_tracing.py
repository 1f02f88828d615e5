"""Spans of the mesh, as a real OTLP receiver gets them; that they cost nothing when off; what a dead collector does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from deploy.local.embedded import free_port
from shared.contract import limits
from shared.contract.endpoints import Endpoint
from shared.contract.ids import Epoch, SequenceId, sequence_id
from shared.traces import context, tracing
from shared.traces.context import Sampler
from shared.traces.export import BATCH_SPANS, SdkSink
from shared.traces.spans import FinishedSpan, SpanName
from shared.traces.tracing import NO_STEP, Tracing
from tests.otlp_receiver import OtlpReceiver, Protocol, ReceivedSpan

CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=x"}
CLIENT_UNSAMPLED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"}
SEQUENCE = sequence_id("running_sum", "", 42)
MANY = ",".join(f"k{one}=v" for one in range(33))
DEPLOY = Path(__file__).parents[3] / "deploy"
COLLECTORS = ("otel-collector.yaml", "otel-collector.viewer.yaml")


@pytest.fixture(autouse=True)
def no_variables_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@contextmanager
def tracing_to(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Generator[Tracing]:
    """Tracing as a service of this environment has it, exporting to the receiver by gRPC unless `variables` differ."""
    for name, value in {**receiver.environment(), **variables}.items():
        monkeypatch.setenv(name, value)
    subject = tracing.setup("gateway", "gateway-1")
    yield subject
    subject.shutdown()


@pytest.fixture
def subject(otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    with tracing_to(otlp_receiver, monkeypatch) as subject:
        yield subject


class Kept:
    """A sink that only keeps."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def emit(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def shutdown(self, timeout_s: float) -> None:
        pass


def received(receiver: OtlpReceiver, subject: Tracing) -> list[ReceivedSpan]:
    """All spans, after the last has left."""
    subject.shutdown()
    return receiver.spans


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only span of that name."""
    (span,) = [span for span in spans if span.name == name]
    return span


def whole_step(subject: Tracing, sequence: SequenceId | None, *, start: bool, step: int) -> str:
    """One request's spans, as gateway and executor record them; returns the step's traceparent."""
    span = subject.begin_step(sequence, "running_sum", start=start, trace_headers=CLIENT)
    span.accepted(step)
    now = time.time_ns()
    for name in (SpanName.SCHEDULE, SpanName.QUEUE, SpanName.COMPUTE, SpanName.CHECKPOINT):
        subject.record(span.traceparent, name, now, now + 1000, batch=3)
    span.replied()
    span.end()
    return span.traceparent


# --- One trace per sequence


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_one_trace_per_sequence_and_one_span_per_step_with_its_six_children(
    protocol: Protocol, otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = otlp_receiver.environment(protocol)
    with tracing_to(otlp_receiver, monkeypatch, **variables) as subject:
        whole_step(subject, SEQUENCE, start=True, step=1)
        whole_step(subject, SEQUENCE, start=False, step=2)
        subject.record_of_sequence(SEQUENCE, SpanName.END, 5, 6)
        spans = received(otlp_receiver, subject)

    assert {context.describe("running_sum", "", 42)} == {span.trace_id for span in spans}
    root = named(spans, "sequence.start")
    assert "" == root.parent_id
    assert context.sequence_traceparent(SEQUENCE) == f"00-{root.trace_id}-{root.span_id}-01"
    steps = [span for span in spans if span.name == "step"]
    assert [1, 2] == sorted(span.attributes["seqmesh.step"] for span in steps)
    assert {root.span_id} == {span.parent_id for span in steps}
    for step in steps:
        children = [span.name for span in spans if span.parent_id == step.span_id]
        assert ["checkpoint", "compute", "gateway", "queue", "reply", "schedule"] == sorted(children)
    end = named(spans, "sequence.end")
    assert root.span_id == end.parent_id
    assert end.attributes == {name: root.attributes[name] for name in ("seqmesh.model", "seqmesh.sequence")}
    assert len(spans) == len({span.span_id for span in spans})


def test_the_trace_can_be_looked_up_while_the_sequence_still_runs(
    otlp_receiver: OtlpReceiver, subject: Tracing
) -> None:
    whole_step(subject, SEQUENCE, start=True, step=1)
    otlp_receiver.wait_for(lambda spans: any(span.name == "step" for span in spans))

    spans = otlp_receiver.trace(context.describe("running_sum", "", 42))

    assert {"sequence.start", "step"} <= {span.name for span in spans}


def test_ids_42_and_its_text_have_different_traces() -> None:
    assert context.describe("running_sum", "", 42) != context.describe("running_sum", "", "42")


def test_the_trace_id_of_a_sequence_never_changes_between_releases() -> None:
    assert "ade1926d07d9b73426cc91758db72eda" == context.describe("m", "", 42)


def test_a_start_on_a_live_record_gets_a_start_span_of_its_own_below_the_root(
    otlp_receiver: OtlpReceiver, subject: Tracing
) -> None:
    whole_step(subject, SEQUENCE, start=True, step=1)
    whole_step(subject, SEQUENCE, start=True, step=2)
    spans = received(otlp_receiver, subject)

    first, second = sorted((span for span in spans if span.name == "sequence.start"), key=lambda span: span.parent_id)
    assert "" == first.parent_id
    assert first.span_id == second.parent_id


def test_a_sequence_that_begins_without_start_has_its_root_too(otlp_receiver: OtlpReceiver, subject: Tracing) -> None:
    whole_step(subject, SEQUENCE, start=False, step=1)

    assert "" == named(received(otlp_receiver, subject), "sequence.start").parent_id


def test_a_repeated_start_does_not_record_the_root_again() -> None:
    kept = Kept()
    step = Tracing(kept).begin_step(SEQUENCE, "running_sum", start=True, trace_headers={})
    step.accepted(1, repeated=True)
    step.end()

    assert ["gateway", "step"] == [span.name for span in kept.spans]
    assert True is kept.spans[1].attributes["seqmesh.repeated"]


def test_a_step_that_is_answered_before_its_acceptance_is_told_has_each_span_once() -> None:
    """The answer comes over another connection than what Redis says of the step."""
    kept = Kept()
    step = Tracing(kept).begin_step(SEQUENCE, "running_sum", start=True, trace_headers={})
    step.replied()
    step.end()
    recorded = {span.name: dict(span.attributes) for span in kept.spans}
    step.accepted(1)

    assert ["gateway", "reply", "sequence.start", "step"] == sorted(span.name for span in kept.spans)
    assert recorded == {span.name: span.attributes for span in kept.spans if span.name in recorded}


def test_a_refused_request_has_no_start_and_carries_its_error(otlp_receiver: OtlpReceiver, subject: Tracing) -> None:
    step = subject.begin_step(SEQUENCE, "running_sum", start=True, trace_headers={})
    step.end("the backlog is full", "UNAVAILABLE")
    step.end("a second end changes nothing")
    spans = received(otlp_receiver, subject)

    assert ["gateway", "step"] == sorted(span.name for span in spans)
    assert "the backlog is full" == named(spans, "step").error
    assert "UNAVAILABLE" == named(spans, "step").attributes["error.type"]
    assert named(spans, "gateway").error is None


def test_an_export_of_nothing_but_long_errors_fits_into_a_message_to_a_collector(
    otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "\N{MUSICAL SYMBOL G CLEF}" * limits.ERROR_CHARACTERS_MAX
    with tracing_to(otlp_receiver, monkeypatch, OTEL_BSP_SCHEDULE_DELAY="60000") as subject:
        for _ in range(BATCH_SPANS):
            subject.record(context.sequence_traceparent(SEQUENCE), SpanName.COMPUTE, 1, 2, error=error)
        spans = received(otlp_receiver, subject)

    assert BATCH_SPANS == len(spans)
    assert all(span.error and error.startswith(span.error) for span in spans)


@pytest.mark.parametrize("name", [SpanName.TAKEOVER, SpanName.PAGED_IN])
def test_a_takeover_is_linked_from_the_new_owners_span_without_either_being_told(
    otlp_receiver: OtlpReceiver, subject: Tracing, name: SpanName
) -> None:
    """The scheduler and the new executor share nothing but sequence and epoch."""
    last_step = whole_step(subject, SEQUENCE, start=True, step=1)
    subject.record_takeover(SEQUENCE, Epoch(7), 10, 20, name, executor="b")
    step = subject.begin_step(SEQUENCE, "running_sum", start=False, trace_headers={})
    takeover = context.takeover_traceparent(SEQUENCE, Epoch(7))
    subject.record(step.traceparent, SpanName.COMPUTE, 30, 40, links=[takeover, last_step, ""], executor="b")
    step.end()
    spans = received(otlp_receiver, subject)

    moved = named(spans, name)
    assert named(spans, "sequence.start").span_id == moved.parent_id
    assert {"seqmesh.epoch": 7, "seqmesh.executor": "b"}.items() <= moved.attributes.items()
    (resumed,) = [span for span in spans if span.attributes.get("seqmesh.executor") == "b" and span.name == "compute"]
    assert [(moved.trace_id, moved.span_id), (moved.trace_id, last_step.split("-")[2])] == resumed.links


# --- Batches, and the conventions


def test_a_batch_is_a_trace_of_its_own_that_links_to_its_steps_and_they_to_it(
    otlp_receiver: OtlpReceiver, subject: Tracing
) -> None:
    ran = [subject.begin_step(sequence_id("m", "", id), "m", start=False, trace_headers={}) for id in (1, 2)]
    batch = subject.record_batch([step.traceparent for step in ran], 30, 40, batch_size=5, model="m")
    for step in ran:
        subject.record(step.traceparent, SpanName.COMPUTE, 30, 40, links=[batch])
        step.end()
    spans = received(otlp_receiver, subject)

    recorded = named(spans, "batch")
    steps = {(span.trace_id, span.span_id) for span in spans if span.name == "step"}
    assert steps == set(recorded.links)
    assert "" == recorded.parent_id
    assert {"seqmesh.batch_size": 5, "seqmesh.model": "m"}.items() <= recorded.attributes.items()
    (links,) = {tuple(span.links) for span in spans if span.name == "compute"}
    assert ((recorded.trace_id, recorded.span_id),) == links
    assert recorded.trace_id not in {trace for trace, _ in steps}


def test_a_batch_without_a_recorded_step_is_not_recorded() -> None:
    kept = Kept()

    assert "" == Tracing(kept).record_batch([], 1, 2, batch_size=4)
    assert [] == kept.spans


def test_a_large_batch_links_to_as_many_steps_as_other_sdks_would() -> None:
    kept = Kept()
    parents = [context.sequence_traceparent(sequence_id("m", "", id)) for id in range(1, 1000)]

    Tracing(kept).record_batch(parents, 1, 2, batch_size=999)

    (batch,) = kept.spans
    assert 128 == len(batch.links)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_step_says_by_which_protocol_it_came_in_the_words_of_the_conventions(endpoint: Endpoint) -> None:
    kept = Kept()

    Tracing(kept).begin_step(SEQUENCE, "m", start=False, trace_headers={}, endpoint=endpoint).end()

    attributes = kept.spans[-1].attributes
    by_http = attributes.get("http.request.method") == "POST" and "http.route" in attributes
    by_grpc = attributes.get("rpc.system") == "grpc" and "rpc.method" in attributes
    assert by_http is endpoint.startswith("HTTP")
    assert by_grpc is not by_http


def test_a_step_of_an_ensemble_is_below_its_request_and_came_by_no_protocol() -> None:
    kept = Kept()
    subject = Tracing(kept)
    whole = subject.begin_step(SEQUENCE, "e", start=False, trace_headers={}, of_ensemble=True)
    subject.begin_step(None, "m", start=False, trace_headers={}, within=whole.traceparent).end()

    (part,) = [span for span in kept.spans if span.name == SpanName.STEP]
    assert whole.traceparent.split("-")[1:3] == [f"{part.trace_id:032x}", f"{part.parent_id:016x}"]
    assert {"seqmesh.model": "m"} == part.attributes
    assert NO_STEP is subject.begin_step(None, "m", start=False, trace_headers=CLIENT, within="")


def test_spans_have_the_kinds_and_attributes_of_what_they_do_elsewhere(
    otlp_receiver: OtlpReceiver, subject: Tracing
) -> None:
    parent = whole_step(subject, SEQUENCE, start=True, step=1)
    subject.record_batch([parent], 1, 2, batch_size=1)
    failing = subject.begin_step(SEQUENCE, "m", start=False, trace_headers={})
    failing.end("no such thing", "NOT_FOUND")
    spans = received(otlp_receiver, subject)

    kinds = {span.name: span.kind for span in spans}
    assert kinds == {
        "sequence.start": "internal",
        "step": "server",
        "gateway": "producer",
        "schedule": "internal",
        "queue": "internal",
        "compute": "internal",
        "checkpoint": "client",
        "reply": "internal",
        "batch": "consumer",
    }
    assert "redis" == named(spans, "checkpoint").attributes["db.system.name"]
    assert "process" == named(spans, "batch").attributes["messaging.operation.type"]
    (failed,) = [span for span in spans if span.error]
    assert ("no such thing", "NOT_FOUND") == (failed.error, failed.attributes["error.type"])


def test_the_shipped_collectors_judge_by_spans_that_there_are_and_name_only_what_they_define() -> None:
    """A collector starts with a policy on a span that nothing records, and keeps nothing by it."""
    plain, viewer = (yaml.safe_load((DEPLOY / name).read_text()) for name in COLLECTORS)
    policies = viewer["processors"]["tail_sampling"]["policies"]
    conditions = [text for one in policies if "ottl_condition" in one for text in one["ottl_condition"]["span"]]

    judged = re.findall(r'name == "([^"]+)"', " ".join(conditions))
    assert {SpanName.TAKEOVER, SpanName.EXPIRED, SpanName.STEP} == set(judged)
    assert {"ERROR"} == {
        code for one in policies if "status_code" in one for code in one["status_code"]["status_codes"]
    }
    for pipelines, defined in ((plain, [plain]), (viewer, [plain, viewer])):
        (pipeline,) = pipelines["service"]["pipelines"].values()
        for kind, names in pipeline.items():
            assert set(names) <= {name for config in defined for name in config.get(kind, ())}


def test_the_guide_names_every_span() -> None:
    guide = (DEPLOY.parent / "docs/guides/tracing.md").read_text()

    assert [] == [name for name in SpanName if f"`{name}`" not in guide]


# --- The client's context


def test_a_clients_context_is_linked_from_its_step_and_named_by_an_attribute(
    otlp_receiver: OtlpReceiver, subject: Tracing
) -> None:
    whole_step(subject, SEQUENCE, start=True, step=1)
    step = named(received(otlp_receiver, subject), "step")

    assert [(CLIENT_TRACE, CLIENT_SPAN)] == step.links
    assert CLIENT_TRACE == step.attributes["seqmesh.client_trace_id"]
    assert "server" == step.kind


def test_a_request_of_no_sequence_belongs_to_its_clients_trace(otlp_receiver: OtlpReceiver, subject: Tracing) -> None:
    whole_step(subject, None, start=False, step=0)
    spans = received(otlp_receiver, subject)

    step = named(spans, "step")
    assert (CLIENT_TRACE, CLIENT_SPAN, "vendor=x") == (step.trace_id, step.parent_id, step.trace_state)
    assert [] == step.links
    assert {CLIENT_TRACE} == {span.trace_id for span in spans}
    assert "sequence.start" not in {span.name for span in spans}


def test_a_request_of_no_sequence_without_context_is_a_trace_of_its_own() -> None:
    kept = Kept()
    for _ in range(2):
        Tracing(kept).begin_step(None, "add_sub", start=False, trace_headers={}).end()

    one, other = (span for span in kept.spans if span.name == "step")
    assert 0 == one.parent_id
    assert one.trace_id != other.trace_id


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-{'0' * 16}-01",
        f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01-more",
        f"00-{CLIENT_TRACE.upper()}-{CLIENT_SPAN}-01",
        "00-" + "é" * 32 + f"-{CLIENT_SPAN}-01",
    ],
)
def test_an_invalid_context_is_as_none(traceparent: str) -> None:
    kept = Kept()
    Tracing(kept).begin_step(None, "add_sub", start=False, trace_headers={"traceparent": traceparent}).end()

    assert 0 == kept.spans[-1].parent_id


@pytest.mark.parametrize("told", ["null", "00-" + "x" * 32 + "-" + "x" * 16 + "-01", "00-1", "\ud800" * 60])
def test_what_another_service_wrote_and_is_no_context_is_of_no_trace(told: str) -> None:
    """It comes with a step or a checkpoint: whoever records a batch of many must not end with it."""
    sink = Kept()
    subject = Tracing(sink)
    own = context.traceparent(1, 2)

    assert "" == subject.record(told, SpanName.QUEUE, 1, 2)
    assert subject.record(own, SpanName.COMPUTE, 1, 2, links=[told])
    assert subject.record_batch([own, told], 1, 2, batch_size=2)
    assert 2 == len(sink.spans)


def test_a_context_of_a_later_version_of_the_standard_is_understood() -> None:
    kept = Kept()
    headers = {"traceparent": f"01-{CLIENT_TRACE}-{CLIENT_SPAN}-01-more"}
    Tracing(kept).begin_step(None, "add_sub", start=False, trace_headers=headers).end()

    assert int(CLIENT_SPAN, 16) == kept.spans[-1].parent_id


@pytest.mark.parametrize(
    "state", ["=", "a", "A=1", "x" * 600, "\ud800=1", "a=1,,=", "a=\n", ",,", "1a=x", "a@1=x", MANY]
)
def test_a_malformed_tracestate_is_left_behind_and_the_context_kept(state: str) -> None:
    kept = Kept()
    Tracing(kept).begin_step(None, "m", start=False, trace_headers={**CLIENT, "tracestate": state}).end()

    assert ("", int(CLIENT_SPAN, 16)) == (kept.spans[-1].trace_state, kept.spans[-1].parent_id)


# --- Times


def test_children_lie_within_their_step_and_in_order() -> None:
    kept = Kept()
    step = Tracing(kept).begin_step(SEQUENCE, "running_sum", start=True, trace_headers={}, arrived_ns=1_000)
    step.accepted(1)
    step.replied()
    step.end()
    gateway, _, reply, whole = kept.spans

    times = [whole.start_ns, gateway.start_ns, gateway.end_ns, reply.start_ns, reply.end_ns, whole.end_ns]
    assert [] == [(one, other) for one, other in pairwise(times) if one > other]
    assert 1_000 == whole.start_ns == gateway.start_ns


def test_a_span_never_ends_before_its_start_though_hosts_clocks_differ() -> None:
    kept = Kept()
    subject = Tracing(kept)
    subject.record_of_sequence(SEQUENCE, SpanName.SCHEDULE, 2_000, 1_000)

    assert (2_000, 2_000) == (kept.spans[0].start_ns, kept.spans[0].end_ns)


def test_no_span_of_a_step_ends_before_its_start_though_the_clock_was_set_back() -> None:
    kept = Kept()
    arrived_ns = time.time_ns() + 3_600_000_000_000
    step = Tracing(kept).begin_step(SEQUENCE, "running_sum", start=True, trace_headers={}, arrived_ns=arrived_ns)
    step.accepted(1)
    step.replied()
    step.end()

    assert [] == [span.name for span in kept.spans if span.end_ns < span.start_ns]


@pytest.mark.parametrize(
    ("after_us", "before_us", "expected_us"),
    [
        pytest.param(-9_000, 9_000, 499, id="anywhere in the millisecond"),
        pytest.param(600, 9_000, 799, id="behind the arrival"),
        pytest.param(-9_000, 200, 100, id="before the batch"),
        pytest.param(300, 700, 500, id="between the two"),
        pytest.param(1_500, 9_000, 0, id="the gateway's clock is ahead"),
        pytest.param(-9_000, -100, 0, id="the executor's clock is behind"),
    ],
)
def test_the_time_of_a_stream_entry_is_the_middle_of_what_is_possible_in_its_millisecond(
    after_us: int, before_us: int, expected_us: int
) -> None:
    ms = 1_700_000_000_123_000_000
    found = tracing.entry_time_ns("1700000000123-7", ms + 1_000 * after_us, ms + 1_000 * before_us)
    assert expected_us == (found - ms) // 1_000


# --- Sampling


def test_a_sequence_is_sampled_whole_or_not_at_all_and_every_service_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    gateway, scheduler = (Tracing(Kept(), context.sampler_from(os.environ)) for _ in range(2))
    sequences = [sequence_id("running_sum", "", number) for number in range(2000)]

    begun = [
        {gateway.begin_step(one, "m", start=start, trace_headers=CLIENT) is not NO_STEP for start in (True, False)}
        for one in sequences
    ]

    assert [{bool(scheduler.record_of_sequence(one, SpanName.EXPIRED, 1, 1))} for one in sequences] == begun
    assert 400 < begun.count({True}) < 600


def test_the_ratio_decides_as_the_sdks_own_sampler_does() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased  # noqa: PLC0415 - only this test needs it

    theirs = TraceIdRatioBased(0.3)
    ours = context.sampler_from({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"})
    ids = [int(context.describe("m", "", number), 16) for number in range(500)]

    expected = [theirs.should_sample(None, one, "step").decision is Decision.RECORD_AND_SAMPLE for one in ids]
    assert expected == [ours.samples(one) for one in ids]


@pytest.mark.parametrize(
    ("name", "sequence", "sampled_client", "unsampled_client", "no_client"),
    [
        ("", True, True, False, True),
        ("parentbased_always_on", True, True, False, True),
        ("parentbased_always_off", False, True, False, False),
        ("always_on", True, True, True, True),
        ("always_off", False, False, False, False),
        ("no such sampler", True, True, False, True),
    ],
)
def test_the_standards_samplers(
    name: str, sequence: bool, sampled_client: bool, unsampled_client: bool, no_client: bool
) -> None:
    subject = Tracing(Kept(), context.sampler_from({"OTEL_TRACES_SAMPLER": name}))

    def sampled(of: SequenceId | None, headers: dict[str, str]) -> bool:
        return subject.begin_step(of, "m", start=False, trace_headers=headers).traceparent != ""

    assert (sequence, sequence) == (sampled(SEQUENCE, {}), sampled(SEQUENCE, CLIENT_UNSAMPLED))
    assert (sampled_client, unsampled_client) == (sampled(None, CLIENT), sampled(None, CLIENT_UNSAMPLED))
    assert no_client == sampled(None, {})


@pytest.mark.parametrize("ratio", ["-1", "2", "nan", "many"])
def test_a_ratio_that_is_none_is_logged_and_taken_for_one(ratio: str, caplog: pytest.LogCaptureFixture) -> None:
    variables = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": ratio}

    assert Sampler() == context.sampler_from(variables)
    assert [{"OTEL_TRACES_SAMPLER_ARG": ratio}] == fields(caplog)


# --- Off


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_SERVICE_NAME": "mesh", "OTEL_TRACES_SAMPLER": "always_on"},
    ],
)
def test_off_it_imports_no_sdk_and_starts_no_thread(variables: dict[str, str]) -> None:
    program = (
        "import sys, threading; from shared.traces import tracing; t = tracing.setup('gateway', 'g');"
        "assert not t.enabled; assert threading.active_count() == 1;"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry', 'grpc'))]; t.shutdown()"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program], env={**kept, **variables}, check=True, timeout=60)


def test_off_or_unsampled_every_step_is_the_same_object_that_records_nothing() -> None:
    kept = Kept()
    for subject in (Tracing(), Tracing(kept, Sampler(0))):
        step = subject.begin_step(SEQUENCE, "running_sum", start=True, trace_headers=CLIENT)
        assert step is NO_STEP
        step.accepted(1)
        step.replied()
        step.end("error")
        assert "" == step.traceparent == subject.record_of_sequence(SEQUENCE, SpanName.EXPIRED, 1, 1)
        assert "" == subject.record(step.traceparent, SpanName.COMPUTE, 1, 2, batch=1)
        assert "" == subject.record_takeover(SEQUENCE, Epoch(1), 1, 2)

    assert [] == kept.spans


def test_an_executor_that_is_not_traced_ignores_a_traced_gateways_context() -> None:
    assert "" == Tracing().record(f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", SpanName.COMPUTE, 1, 2)


# --- Settings


def test_an_endpoint_alone_switches_tracing_on(otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.endpoint())
    subject = tracing.setup("executor", "executor-1")
    whole_step(subject, SEQUENCE, start=True, step=1)
    spans = received(otlp_receiver, subject)

    resource = named(spans, "step").resource
    assert ("seqmesh-executor", "executor-1") == (resource["service.name"], resource["service.instance.id"])


def test_the_standards_variables_name_the_service(otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = "deployment.environment=staging,service.instance.id=seven"
    with tracing_to(
        otlp_receiver, monkeypatch, OTEL_SERVICE_NAME="mesh", OTEL_RESOURCE_ATTRIBUTES=attributes
    ) as subject:
        whole_step(subject, SEQUENCE, start=True, step=1)
        resource = named(received(otlp_receiver, subject), "step").resource

    assert ("mesh", "seven", "staging") == (
        resource["service.name"],
        resource["service.instance.id"],
        resource["deployment.environment"],
    )


def test_spans_to_the_console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    subject = tracing.setup("gateway", "gateway-1")
    whole_step(subject, SEQUENCE, start=True, step=1)
    subject.shutdown()

    assert context.describe("running_sum", "", 42) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_what_is_not_known_is_logged_and_the_service_runs_without_traces(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)

    assert not tracing.setup("gateway", "gateway-1").enabled
    assert value == fields(caplog)[0][name]


# --- A collector that does not answer


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """An address that accepts connections and then never says a word: the worst kind of dead collector."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_silent_collector_costs_bounded_memory_and_delays_neither_spans_nor_the_stop(
    protocol: str, silent_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", silent_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    # Until then the spans that were sent first keep their places in the queue.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    subject = tracing.setup("gateway", "gateway-1")
    sink = subject._sink
    assert isinstance(sink, SdkSink)
    for _ in range(200):
        whole_step(subject, SEQUENCE, start=False, step=2)

    assert 200 * 7 - 100 == sink.lost
    begun = time.monotonic()
    subject.shutdown(timeout_s=0.2)
    # The exporter's own timeout is a minute here, the SDK's shutdown waits for 30 s.
    assert time.monotonic() - begun < 20
    assert {"spans": 200 * 7} == fields(caplog)[-1], "those that were dropped, and those that still waited"


@pytest.mark.parametrize(
    ("name", "text"),
    [("TIMEOUT", "soon"), ("COMPRESSION", "much"), ("ENDPOINT", "http://[::1")],
)
def test_a_service_starts_without_spans_where_the_sdk_refuses_a_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)

    assert not tracing.setup("gateway", "gateway-1").enabled
    # An exporter of a test before may still give up meanwhile, on its own thread and logger.
    said = [record.getMessage() for record in caplog.records if record.name == "seqmesh"]
    assert ["variables of tracing are refused, no spans are sent"] == said


@pytest.fixture
def closed_endpoint() -> str:
    """An address where nobody listens, nor begins to."""
    return f"http://127.0.0.1:{free_port()}"


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(
    closed_endpoint: str, otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with tracing_to(otlp_receiver, monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT=closed_endpoint) as subject:
        sink = subject._sink
        assert isinstance(sink, SdkSink)
        for _ in range(3):
            lost = sink.lost
            whole_step(subject, SEQUENCE, start=False, step=2)
            wait_until(lambda lost=lost: sink.lost == lost + 7)
        with tracing_to(otlp_receiver, monkeypatch) as other:
            other_sink = other._sink
            assert isinstance(other_sink, SdkSink)
            # The same exporter, its collector back: the wire is the SDK's business, the judgement is ours.
            sink._exporters[0]._exporter = other_sink._exporters[0]._exporter
            whole_step(subject, SEQUENCE, start=False, step=2)
            # All seven: they may leave in two batches, and the exporter ends with this block.
            otlp_receiver.wait_for(lambda spans: len(spans) == 7)
            wait_until(lambda: "spans are exported again" in caplog.messages)

    assert 7 == len(otlp_receiver.spans)
    began, over, *_ = [record for record in caplog.records if record.name == "seqmesh"]
    assert "spans cannot be exported, they are dropped" == began.getMessage()
    assert "spans are exported again" == over.getMessage()
    assert 21 == vars(over)["fields"]["lost"]
    assert 1 == caplog.messages.count(began.getMessage())


def test_the_log_names_the_reason_of_an_outage_and_spares_the_exporters_own_lines(closed_endpoint: str) -> None:
    """One or more come with every attempt. (A process of its own: pytest's log capture is louder than a service's.)"""
    program = (
        "import sys, time; from shared.process import logs; from shared.traces import tracing;"
        "logs.configure('debug', 'text', stream=sys.stdout);"
        "t = tracing.setup('gateway', 'g'); begin = lambda: t.begin_step('m||i1', 'm', start=True, trace_headers={});\n"
        "for lost in (2, 4):\n"
        "    begin().end()\n"
        "    while t._sink.lost < lost: time.sleep(0.01)\n"
        "t.shutdown()"
    )
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": closed_endpoint,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
    }
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=60, capture_output=True)

    began, over = run.stdout.decode().splitlines()
    assert "spans cannot be exported, they are dropped" in began
    assert closed_endpoint.removeprefix("http://") in began
    assert "spans were lost" in over
    assert b"" == run.stderr


def test_spans_of_the_last_moment_leave_at_a_stop_and_its_thread_ends(
    otlp_receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracing_to(otlp_receiver, monkeypatch, OTEL_BSP_SCHEDULE_DELAY="60000") as subject:
        whole_step(subject, SEQUENCE, start=True, step=1)
        subject.shutdown()
        subject.shutdown()

        assert 8 == len(otlp_receiver.spans)
        assert NO_STEP is subject.begin_step(SEQUENCE, "m", start=True, trace_headers={})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """What the mesh's own log lines say beside their event."""
    return [vars(record)["fields"] for record in caplog.records if record.name == "seqmesh"]


def wait_until(claim: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
