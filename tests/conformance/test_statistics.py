"""What is counted of a model, in its statistics and on the metrics page (triton-spec 1.4, 5.7, 7).

The model `counted` is this file's alone: two slots, so that a lone sequence in the second one has a null row before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Caller, Gate, Step, Stream, count, fresh_id, neighbours, refused, settled
from tests.conformance.targets import Target
from tests.mesh.running_mesh import eventually

MODEL = "counted"
COUNTED = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
OF_EVERY_MODEL = {
    "nv_inference_request_success": "counter",
    "nv_inference_request_failure": "counter",
    "nv_inference_count": "counter",
    "nv_inference_exec_count": "counter",
    "nv_inference_request_duration_us": "counter",
    "nv_inference_queue_duration_us": "counter",
    "nv_inference_compute_input_duration_us": "counter",
    "nv_inference_compute_infer_duration_us": "counter",
    "nv_inference_compute_output_duration_us": "counter",
    "nv_inference_pending_request_count": "gauge",
}
OF_THE_MACHINE = {
    "nv_cpu_utilization": "gauge",
    "nv_cpu_memory_total_bytes": "gauge",
    "nv_cpu_memory_used_bytes": "gauge",
    "nv_pinned_memory_pool_total_bytes": "gauge",
    "nv_pinned_memory_pool_used_bytes": "gauge",
}


@pytest.fixture
def counting(caller: Caller) -> Caller:
    """A caller of the model that nobody else uses."""
    return caller.of(MODEL)


def batches(statistics: Mapping[str, Any]) -> dict[int, int]:
    """Executions by batch size."""
    return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in statistics.get("batch_stats", [])}


async def test_inferences_are_real_rows_and_batches_have_null_rows(counting: Caller) -> None:
    before = await counting.statistics()
    answered = count(before, "success") + count(before, "fail")
    first, second = neighbours(MODEL, 2)

    await counting(first, 1, start=True)  # alone in the first slot
    await counting(second, 1, start=True)  # in the second slot, behind a null row
    await counting(first, 1)  # slots above the highest ready one are left out
    await counting(first, 1, end=True)
    await counting(second, 1, end=True)  # the first slot is free, and a row all the same

    after = await settled(counting, answered + 5)
    assert 5 == after["inference_count"] - before.get("inference_count", 0)
    assert 5 == after["execution_count"] - before.get("execution_count", 0)
    sizes = batches(after)
    assert (3, 2) == tuple(sizes[size] - batches(before).get(size, 0) for size in (1, 2))
    grown = {name: count(after, name) - count(before, name) for name in COUNTED}
    assert {name: 0 if name in ("fail", "cache_hit", "cache_miss") else 5 for name in COUNTED} == grown
    assert after["last_inference"] > before.get("last_inference", 0)


@pytest.mark.differs("Triton's python backend counts an answer that is an error as a success, unlike an exception")
@pytest.mark.parametrize("how", ["fail", "raise"])
async def test_a_failed_request_is_a_failure_and_no_inference(counting: Caller, how: str) -> None:
    before = await counting.statistics()
    answered = count(before, "success") + count(before, "fail")
    failures = failures_of(counting.target)
    identity = fresh_id()
    await counting(identity, 1, start=True)

    with refused(Code.INTERNAL):
        await counting.infer(Step(identity, 1, parameters={how: "the model would not"}))
    await counting(identity, 1, end=True)

    after = await settled(counting, answered + 3)
    failed = 1 if counting.target.is_mesh or how == "raise" else 0
    assert (3 - failed, failed) == tuple(count(after, name) - count(before, name) for name in ("success", "fail"))
    assert 3 - failed == after["inference_count"] - before.get("inference_count", 0)
    assert 3 == after["execution_count"] - before.get("execution_count", 0)
    assert {**failures, "BACKEND": failures["BACKEND"] + failed} == failures_of(counting.target)


async def test_what_is_refused_before_it_is_accepted_is_not_counted(counting: Caller) -> None:
    before = await counting.statistics()
    failures = failures_of(counting.target)

    with refused(Code.INVALID_ARG, f"inference request for sequence {(identity := fresh_id())} to model '{MODEL}'"):
        await counting(identity, 1)

    assert count(before, "fail") == count(await counting.statistics(), "fail")
    assert failures == failures_of(counting.target)


async def test_statistics_of_what_is_not_there_are_refused(caller: Caller) -> None:
    with refused(Code.INVALID_ARG, "requested model 'nobody_knows' is not available"):
        await caller.all_statistics("nobody_knows")
    with refused(Code.INVALID_ARG, f"requested model version is not available for model '{MODEL}'"):
        await caller.all_statistics(MODEL, "7")


async def test_statistics_of_everything_are_those_of_every_ready_model(caller: Caller) -> None:
    statistics = await caller.all_statistics()

    names = [entry["name"] for entry in statistics]
    assert MODEL in names
    assert {entry["name"] for entry in statistics if entry["version"] == "1"} == set(names)
    assert [MODEL] == [entry["name"] for entry in await caller.all_statistics(MODEL, "1")]


def failures_of(target: Target) -> dict[str, float]:
    """Failures of the model by reason; all four reasons are always there, labels in the order of their names."""
    found = target.metrics_page()
    line = r'^nv_inference_request_failure\{model="%s",reason="%s",version="1"\} (\S+)$'
    return {reason: float(re.findall(line % (MODEL, reason), found, re.MULTILINE)[0]) for reason in REASONS}


async def test_the_metrics_page_has_tritons_names_types_and_labels(target: Target) -> None:
    found = target.metrics_page()

    for name, kind in {**OF_EVERY_MODEL, **OF_THE_MACHINE}.items():
        assert f"# TYPE {name} {kind}\n" in found, name
    for name in OF_EVERY_MODEL:
        if name != "nv_inference_request_failure":
            assert re.search(rf'^{name}\{{model="{MODEL}",version="1"\}} \d', found, re.MULTILINE), name


async def test_requests_are_pending_until_they_run(target: Target, gate: Gate) -> None:
    identity = fresh_id()

    def pending() -> float:
        (text,) = re.findall(
            r'^nv_inference_pending_request_count\{model="counted",version="1"\} (\S+)$',
            target.metrics_page(),
            re.MULTILINE,
        )
        return float(text)

    async with Stream(target, MODEL) as stream:
        stream.send(Step(identity, 1, start=True, parameters=gate.parameters))
        await gate.entered()
        stream.send(Step(identity, 1), Step(identity, 1, end=True))
        await eventually(lambda: pending() == 2, "two requests wait while one runs")
        gate.open()
        await stream.answers(3)
    await eventually(lambda: pending() == 0, "nothing waits")


async def test_metrics_count_what_statistics_count(lone_caller: Caller) -> None:
    caller = lone_caller.of(MODEL)
    identity = fresh_id()
    before = await caller.statistics()
    answered = count(before, "success") + count(before, "fail")
    await caller(identity, 1, start=True)
    await caller(identity, 1, end=True)
    statistics = await settled(caller, answered + 2)

    found = caller.target.metrics_page()
    line = r'^%s\{model="counted",version="1"\} (\S+)$'
    for name, value in (
        ("nv_inference_request_success", count(statistics, "success")),
        ("nv_inference_count", statistics["inference_count"]),
        ("nv_inference_exec_count", statistics["execution_count"]),
    ):
        assert [value] == [float(text) for text in re.findall(line % name, found, re.MULTILINE)], name
