"""Statistics and metrics of real processes: exact whatever is killed, the same at every gateway, complete."""

from __future__ import annotations

import asyncio
import random
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import add_sum_model
from tests.mesh.raw_http import get, post
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually
from tests.mesh.traffic import Callers, Traffic, make_plans, play_stateless

Page = dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]
"""Family -> type, and per set of labels the value."""

MODEL_COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
MODEL_SUMMARIES = (
    "nv_inference_request_summary_us",
    "nv_inference_queue_summary_us",
    "nv_inference_compute_input_summary_us",
    "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_output_summary_us",
)
MACHINE_GAUGES = (
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
    "nv_pinned_memory_pool_total_bytes",
    "nv_pinned_memory_pool_used_bytes",
)
STATISTICS_FIELDS = (
    "name",
    "version",
    "last_inference",
    "inference_count",
    "execution_count",
    "inference_stats",
    "response_stats",
    "batch_stats",
    "memory_usage",
)

METRICS_CONFIG = "summary_latencies=true,summary_quantiles=0.5:0.05,0.9:0.01,histogram_latencies=true"

COUNTING_MODEL = '''
import triton_python_backend_utils as pb_utils
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, which counts its batches itself too."""

    def initialize(self, args):
        family = pb_utils.MetricFamily("sum_batches", "Batches of the model", pb_utils.MetricFamily.COUNTER)
        self.batches = family.Metric({"model": "running_sum", "kind": "own"})

    def execute(self, requests):
        self.batches.increment(1)
        return super().execute(requests)
'''


def statistics(mesh: RunningMesh, model: str, gateway: int = 0) -> dict[str, Any]:
    """One version's, as JSON."""
    (found,) = get(mesh.http(gateway), f"/v2/models/{model}/stats").document["model_stats"]
    return found


def counted(mesh: RunningMesh, model: str, gateway: int = 0) -> tuple[int, int, int]:
    """Successes, failures, inferences."""
    found = statistics(mesh, model, gateway)
    stats = found["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"], found["inference_count"]


def page(mesh: RunningMesh, gateway: int = 0) -> Page:
    """The metrics, by Prometheus' own parser (which gives a counter the suffix that Triton's lack)."""
    text = get(f"127.0.0.1:{mesh.gateways[gateway].metrics_port}", "/metrics").body.decode()
    return {
        family.name: (
            family.type,
            {
                tuple(sorted(sample.labels.items())): sample.value
                for sample in family.samples
                if sample.name.removesuffix("_total") == family.name
            },
        )
        for family in text_string_to_metric_families(text)
    }


async def test_counts_are_the_answers_exactly_though_executors_are_killed_in_the_middle(
    victim: RunningMesh, chance: random.Random
) -> None:
    before = counted(victim, "slow_sum")
    async with Callers(victim) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic("slow_sum", callers, make_plans(chance, 24, shortest=10, longest=30), chance)
        group.create_task(traffic.run())
        for share, name in ((0.2, "executor-1"), (0.6, "executor-2")):
            await traffic.progress(share)
            await victim.kill_executor(name)

    # Who has an answer finds it counted: there is nothing to wait for.
    after = counted(victim, "slow_sum")
    assert (traffic.total, 0, traffic.total) == tuple(now - then for now, then in zip(after, before, strict=True))
    # Executors report their memory once a second: perhaps between the two questions.
    await eventually(lambda: statistics(victim, "slow_sum") == statistics(victim, "slow_sum", 1), "both say the same")


async def test_stateless_answers_are_counted_exactly_though_an_executor_is_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    before = counted(victim, "add_sub")
    answered: list[None] = []
    async with http_aio.InferenceServerClient(victim.http()) as client, asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(play_stateless(client, chance, 20, answered))
        await eventually(lambda: len(answered) >= 60, "requests are answered")
        await victim.kill_executor("executor-1")

    after = counted(victim, "add_sub")
    assert (240, 0, 240) == tuple(now - then for now, then in zip(after, before, strict=True))


def repository_that_counts(folder: Path) -> Path:
    """running_sum with a metric of its own, a label of the operator's, and slow_sum, whose slots are few."""
    name = add_sum_model(folder)
    model = folder / name
    (model / "1" / "model.py").rename(model / "1" / "running_sum_model.py")
    (model / "1" / "model.py").write_text(COUNTING_MODEL)
    with (model / "config.pbtxt").open("a") as config:
        config.write('\nmetric_tags: { key: "team", value: "a" }\n')
    add_sum_model(folder, "slow_sum", slots=1, batch_s=0.5, virtual_slots=False)
    return folder


def infer(client: Any, model: str, value: int, **flags: Any) -> Any:
    kind = grpc_client.InferInput if isinstance(client, grpc_client.InferenceServerClient) else http_client.InferInput
    given = kind("INPUT", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[value]], np.int32))
    return client.infer(model, [given], **flags)


async def test_statistics_and_metrics_are_complete_and_say_the_same(make_mesh: MakeMesh, tmp_path: Path) -> None:
    models = repository_that_counts(tmp_path / "models")
    mesh = make_mesh(
        models=(models,),
        environment={
            "SEQMESH_METRICS_CONFIG": METRICS_CONFIG,
            "SEQMESH_MODEL_CONTROL_MODE": "explicit",
            "SEQMESH_LOAD_MODEL": "*",
        },
    )
    with grpc_client.InferenceServerClient(mesh.grpc()) as grpc, http_client.InferenceServerClient(mesh.http()) as http:
        for step in range(5):
            infer(grpc, "running_sum", 1, sequence_id=7, sequence_start=step == 0, sequence_end=step == 4)
        by_http = http.get_inference_statistics("running_sum", "1")["model_stats"][0]
        untyped: Any = grpc
        by_grpc = untyped.get_inference_statistics("running_sum", as_json=True)["model_stats"][0]
        await check_pending(mesh, http)

    assert STATISTICS_FIELDS == tuple(by_http)
    assert (5, 5) == (by_http["inference_count"], by_http["execution_count"])
    (batch,) = by_http["batch_stats"]
    assert (1, 5) == (batch["batch_size"], batch["compute_infer"]["count"])
    for name, duration in by_http["inference_stats"].items():
        assert (0 if name in ("fail", "cache_hit", "cache_miss") else 5) == duration["count"], name
        shown = by_grpc["inference_stats"].get(name, {})
        assert duration == {key: int(shown.get(key, 0)) for key in ("count", "ns")}, name
    assert by_http["last_inference"] == int(by_grpc["last_inference"]) > 0
    assert by_http["inference_stats"]["success"]["ns"] > by_http["inference_stats"]["compute_infer"]["ns"] > 0

    await eventually(lambda: 5.0 in page(mesh)["sum_batches"][1].values(), "the model's own metric")
    check_page(page(mesh), by_http)
    check_that_a_reload_begins_at_zero(mesh)


def check_that_a_reload_begins_at_zero(mesh: RunningMesh) -> None:
    """Each load of a model is counted by itself; the other model's counts stay."""
    others = counted(mesh, "slow_sum")
    for action in ("unload", "load"):
        assert HTTPStatus.OK == post(mesh.http(), f"/v2/repository/models/running_sum/{action}", {}).status
    assert (0, 0, 0) == counted(mesh, "running_sum")
    assert 0 == statistics(mesh, "running_sum")["last_inference"]
    with http_client.InferenceServerClient(mesh.http()) as http:
        infer(http, "running_sum", 1, sequence_id=8, sequence_start=True, sequence_end=True)
    assert (1, 0, 1) == counted(mesh, "running_sum")
    assert others == counted(mesh, "slow_sum")


async def check_pending(mesh: RunningMesh, http: Any) -> None:
    """Two sequences, one slot: what waits at the executor, and what waits for a slot."""

    def pending() -> float:
        return page(mesh)["nv_inference_pending_request_count"][1][(("model", "slow_sum"), ("version", "1"))]

    assert 0 == pending()
    async with http_aio.InferenceServerClient(mesh.http()) as client:

        def step(sequence: int, **flags: Any) -> Any:
            given = http_aio.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[1]], np.int32))
            return asyncio.create_task(client.infer("slow_sum", [given], sequence_id=sequence, **flags))

        first = await step(1, sequence_start=True)
        assert [[1]] == first.as_numpy("OUTPUT").tolist()
        waiting = step(2, sequence_start=True)
        await eventually(lambda: pending() == 1, "a step waits for a slot")
        more = [step(1) for _ in range(6)]
        # Who looks late finds that all of them have run.
        async with asyncio.timeout(PATIENCE_S):
            while pending() <= 1:
                await asyncio.sleep(0.05)
                more += [step(1) for _ in range(6 - sum(not one.done() for one in more))]
        last = step(1, sequence_end=True)
        await asyncio.gather(*more, last, waiting)
        await step(2, sequence_end=True)
        await eventually(lambda: pending() == 0, "nothing waits")


def check_page(found: Page, stats: dict[str, Any]) -> None:
    """Every name of triton-spec 7 that can be there without a cache and a GPU, with its type and labels."""
    labels = (("_team", "a"), ("model", "running_sum"), ("version", "1"))
    for name in MODEL_COUNTERS:
        assert "counter" == found[name][0], name
        assert labels in found[name][1], name
    durations = stats["inference_stats"]
    assert durations["success"]["count"] == found["nv_inference_request_success"][1][labels]
    assert durations["success"]["ns"] // 1000 == found["nv_inference_request_duration_us"][1][labels]
    assert stats["execution_count"] == found["nv_inference_exec_count"][1][labels]
    reasons = {
        dict(each)["reason"]: value
        for each, value in found["nv_inference_request_failure"][1].items()
        if dict(each)["model"] == "running_sum"
    }
    assert dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0) == reasons
    for name in MODEL_SUMMARIES:
        assert "summary" == found[name][0], name
        assert {"0.5", "0.9"} == {dict(each).get("quantile") for each in found[name][1]}, name
    assert "histogram" == found["nv_inference_first_response_histogram_ms"][0]
    assert found["nv_model_load_duration_secs"][1][labels] > 0
    for name in MACHINE_GAUGES:
        assert "gauge" == found[name][0], name
        assert [("host",)] == [tuple(label for label, _ in each) for each in found[name][1]], name
    assert ("counter", {(("kind", "own"), ("model", "running_sum")): 5.0}) == found["sum_batches"]
