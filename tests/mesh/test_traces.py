"""The trace of a sequence, as an OpenTelemetry collector receives it from gateways, schedulers and executors."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.contract.ids import SequenceId, sequence_id
from shared.statistics.meter import Phase
from shared.traces.context import sequence_root_id, sequence_trace_id
from tests.mesh.conftest import MakeMesh
from tests.mesh.ensemble_models import add_example
from tests.mesh.model_repository import add_sum_model
from tests.mesh.raw_http import answer, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.test_monitoring import families
from tests.mesh.traffic import Callers, Step, Traffic, make_plans
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

IN_A_STEP = {
    "gateway": "gateway",
    "schedule": "executor",
    "queue": "executor",
    "compute": "executor",
    "checkpoint": "executor",
    "reply": "gateway",
}
"""The children of each step's span, with the service that records them."""


@pytest.fixture
def traced_mesh(make_mesh: MakeMesh, tmp_path: Path, otlp_receiver: OtlpReceiver) -> RunningMesh:
    """Two gateways and two executors that send their spans to the receiver."""
    repository = tmp_path / "models"
    add_sum_model(repository)
    add_sum_model(repository, "other_sum")
    add_sum_model(repository, "brief_sum", idle_us=300_000)
    add_example(repository)
    return make_mesh(models=(repository,), gateways=2, executors=2, environment=otlp_receiver.environment())


def trace_id(sequence: SequenceId) -> str:
    """As the receiver writes it."""
    return f"{sequence_trace_id(sequence):032x}"


def span_key(span: ReceivedSpan) -> tuple[str, str]:
    """As links name it."""
    return span.trace_id, span.span_id


def of(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    """The spans of that name."""
    return [span for span in spans if span.name == name]


async def trace_with(receiver: OtlpReceiver, sequence: SequenceId, **counts: int) -> list[ReceivedSpan]:
    """A sequence's trace as soon as it has so many spans of each name ("__" for ".")."""
    wanted = {name.replace("__", "."): count for name, count in counts.items()}

    def complete() -> bool:
        names = Counter(span.name for span in receiver.trace(trace_id(sequence)))
        return all(names[name] >= count for name, count in wanted.items())

    try:
        await eventually(complete, "")
    except AssertionError:
        names = Counter(span.name for span in receiver.trace(trace_id(sequence)))
        pytest.fail(f"wanted {wanted}, received {dict(names)}")
    return receiver.trace(trace_id(sequence))


async def test_a_sequence_is_one_trace_over_every_service_that_served_it(
    traced_mesh: RunningMesh, otlp_receiver: OtlpReceiver
) -> None:
    client_trace, client_span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traceparent = {"traceparent": f"00-{client_trace}-{client_span}-01"}
    path = "/v2/models/running_sum/infer"
    async with Callers(traced_mesh) as callers:
        first = infer_document(1, sequence_id="traced", sequence_start=True)
        assert 1 == answer(await posted(traced_mesh.http(), path, first, traceparent))
        for total in (2, 3, 4):
            assert total == await callers[total % len(callers)]("running_sum", Step("traced", 1, end=total == 4))
    sequence = sequence_id("running_sum", "", "traced")

    spans = await trace_with(
        otlp_receiver, sequence, step=4, sequence__start=1, sequence__end=1, **dict.fromkeys(IN_A_STEP, 4)
    )

    (root,) = of(spans, "sequence.start")
    assert f"{sequence_root_id(sequence):016x}" == root.span_id
    assert "" == root.parent_id
    steps = of(spans, "step")
    # A batch is told of by itself, perhaps after what was computed in it.
    wanted = {link for compute in of(spans, "compute") for link in compute.links}
    await eventually(
        lambda: len(wanted & {span_key(one) for one in of(otlp_receiver.spans, "batch")}) == len(steps), "batches"
    )
    assert {root.span_id} == {step.parent_id for step in steps}
    assert [1, 2, 3, 4] == sorted(step.attributes["seqmesh.step"] for step in steps)
    for step in steps:
        children = [span for span in spans if span.parent_id == step.span_id]
        assert IN_A_STEP == {child.name: child.service.removeprefix("seqmesh-") for child in children}
        assert all(child.start_ns <= child.end_ns for child in children)
    assert [(client_trace, client_span)] == [link for step in steps for link in step.links]
    batches = {span_key(span): span for span in of(otlp_receiver.spans, "batch")}
    for compute in of(spans, "compute"):
        (batch,) = [batches[link] for link in compute.links if link in batches]
        assert (compute.trace_id, compute.parent_id) in batch.links
    assert {"ModelInfer", "ModelStreamInfer", None} >= {step.attributes.get("rpc.method") for step in steps}
    assert "/v2/models/{model}/infer" in {step.attributes.get("http.route") for step in steps}
    (end,) = of(spans, "sequence.end")
    assert root.span_id == end.parent_id
    assert root.attributes["seqmesh.sequence"] == end.attributes["seqmesh.sequence"]
    assert all(span.error is None for span in spans)


async def test_each_exemplar_of_the_metrics_leads_to_a_step_of_its_model(
    traced_mesh: RunningMesh, otlp_receiver: OtlpReceiver, chance: random.Random
) -> None:
    async with Callers(traced_mesh) as callers:
        for model in ("running_sum", "other_sum"):
            await Traffic(model, callers, make_plans(chance, 3, shortest=3, longest=6), chance).run()

    # Of an executor's phases exemplars come with its reports, once a second.
    expected = {(model, phase) for model in ("running_sum", "other_sum") for phase in ("", *Phase)}
    await eventually(lambda: expected <= {(model, phase) for model, phase, _ in exemplars(traced_mesh)}, "exemplars")
    for model, phase, labels in exemplars(traced_mesh):
        assert {"trace_id", "span_id"} == labels.keys()

        def step(labels: dict[str, str] = labels) -> ReceivedSpan | None:
            return next(
                (one for one in otlp_receiver.trace(labels["trace_id"]) if one.span_id == labels["span_id"]), None
            )

        await eventually(lambda: step() is not None, f"the span of an exemplar of {model}, {phase or 'the whole'}")
        found = step()
        assert found is not None
        assert ("step", model) == (found.name, found.attributes["seqmesh.model"])
        assert trace_id(SequenceId(str(found.attributes["seqmesh.sequence"]))) == labels["trace_id"]
        # The services send theirs by themselves: a step may be there before what others did for it.
        await eventually(
            lambda found=found, phase=phase: not phase or phase in below(otlp_receiver, found),
            f"{phase} of a step of {model}",
        )


def below(receiver: OtlpReceiver, step: ReceivedSpan) -> set[str]:
    """The names of a span's children that have come so far."""
    return {span.name for span in receiver.trace(step.trace_id) if span.parent_id == step.span_id}


def exemplars(mesh: RunningMesh) -> list[tuple[str, str, dict[str, str]]]:
    """Of the times of requests, by either gateway: model, phase ("": the whole) and labels of each exemplar."""
    return [
        (sample.labels["model"], sample.labels.get("phase", ""), sample.exemplar.labels)
        for gateway in range(2)
        for name, family in families(mesh, gateway).items()
        if name.startswith("seqmesh_request_")
        for sample in family.samples
        if sample.exemplar is not None
    ]


async def test_a_request_to_an_ensemble_has_those_to_its_models_below_it(
    traced_mesh: RunningMesh, otlp_receiver: OtlpReceiver
) -> None:
    async with Callers(traced_mesh) as callers:
        for step in (Step("told", 1, start=True), Step("told", 1, end=True)):
            await callers[0]("sum_of_sums", step)
    sequence = sequence_id("sum_of_sums", "", "told")

    # Two requests, each with one to a model without state and two to one with it.
    spans = await trace_with(otlp_receiver, sequence, sequence__start=1, step=8, checkpoint=4, compute=6)

    (root,) = of(spans, "sequence.start")
    requests = [span for span in of(spans, "step") if span.parent_id == root.span_id]
    assert [("sum_of_sums", 1), ("sum_of_sums", 2)] == sorted(
        (span.attributes["seqmesh.model"], span.attributes["seqmesh.step"]) for span in requests
    )
    for request in requests:
        inner = [span for span in spans if span.parent_id == request.span_id]
        assert ["plus_one", "running_sum", "running_sum"] == sorted(span.attributes["seqmesh.model"] for span in inner)
        assert {"step"} == {span.name for span in inner}
        assert all(request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns for span in inner)
        for one in inner:
            await eventually(
                lambda one=one: {"gateway", "queue", "compute", "reply"} <= below(otlp_receiver, one), "its children"
            )
            if "seqmesh.sequence" in one.attributes:
                # The trace of its own tells of its beginning, its end and its owners.
                ((own_trace, own_root),) = one.links
                name = SequenceId(str(one.attributes["seqmesh.sequence"]))
                own = await trace_with(otlp_receiver, name, sequence__start=1, sequence__end=1)
                assert {own_trace} == {span.trace_id for span in own}
                assert own_root in {span.span_id for span in of(own, "sequence.start")}


async def test_a_takeover_is_in_the_trace_and_the_new_owners_first_step_links_to_it(
    traced_mesh: RunningMesh, otlp_receiver: OtlpReceiver, chance: random.Random
) -> None:
    mesh = traced_mesh
    plans = make_plans(chance, 12, shortest=20, longest=30)
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("running_sum", callers, plans, chance)
        group.create_task(traffic.run())
        await traffic.progress(0.3)
        owner = mesh.record(sequence_id("running_sum", "", plans[0].id))["ow"]
        mesh.kill(next(one.name for one in mesh.alive() if one.executor == owner))

    await eventually(lambda: any(span.name == "sequence.takeover" for span in otlp_receiver.spans), "a takeover")
    moved = [
        (sequence, len(plan.values))
        for plan in plans
        if of(otlp_receiver.trace(trace_id(sequence := sequence_id("running_sum", "", plan.id))), "sequence.takeover")
    ]
    assert moved
    for sequence, steps in moved:
        # Every process sends its spans by itself: those of two gateways do not come in the order of the steps.
        await trace_with(otlp_receiver, sequence, sequence__start=1, sequence__takeover=1, sequence__end=1, step=steps)
        spans = await eventually(
            lambda sequence=sequence: with_a_step_of_each_owner(otlp_receiver, sequence), "the new owner's first step"
        )
        takeovers, linked = of(spans, "sequence.takeover"), linked_to_takeovers(spans)
        assert {"executor"} == {span.service.removeprefix("seqmesh-") for span in linked}
        assert {"scheduler"} == {span.service.removeprefix("seqmesh-") for span in takeovers}
        # The other link leads to the last step that the dead executor committed.
        before = {span_key(span) for span in of(spans, "step")}
        assert all(set(span.links) & before for span in linked)
        assert len(of(spans, "sequence.start")) == 1
        numbers = sorted(span.attributes["seqmesh.step"] for span in of(spans, "step"))
        assert list(range(1, len(numbers) + 1)) == numbers


def linked_to_takeovers(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    """What was computed first by a new owner."""
    takeovers = {span_key(span) for span in of(spans, "sequence.takeover")}
    return [span for span in of(spans, "compute") if set(span.links) & takeovers]


def with_a_step_of_each_owner(receiver: OtlpReceiver, sequence: SequenceId) -> list[ReceivedSpan] | None:
    """A sequence's trace, if behind each of its takeovers one step is linked to it."""
    spans = receiver.trace(trace_id(sequence))
    return spans if len(of(spans, "sequence.takeover")) == len(linked_to_takeovers(spans)) else None


async def test_expiry_and_errors_are_in_the_trace(traced_mesh: RunningMesh, otlp_receiver: OtlpReceiver) -> None:
    path = "/v2/models/brief_sum/infer"
    first = infer_document(1, sequence_id="left alone", sequence_start=True)
    assert 1 == answer(await posted(traced_mesh.http(), path, first))
    sequence = sequence_id("brief_sum", "", "left alone")

    spans = await trace_with(otlp_receiver, sequence, sequence__expired=1, step=1)
    (expired,) = of(spans, "sequence.expired")
    assert "scheduler" == expired.service.removeprefix("seqmesh-")
    assert sequence == expired.attributes["seqmesh.sequence"]

    late = await posted(traced_mesh.http(), path, infer_document(1, sequence_id="left alone"))
    assert 400 == late.status
    spans = await trace_with(otlp_receiver, sequence, step=2)
    assert [None, late.error] == [step.error for step in of(spans, "step")]
