"""The metrics page: every name, type and label of triton-spec 7, read as Prometheus reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from gateway.models.exposition import Family
from gateway.models.metric_families import (
    cache_families,
    custom_families,
    hardware_families,
    inference_families,
    shown,
    unreadable_families,
)
from gateway.models.observation import CacheUse, Observed, memory_of
from gateway.models.occupancy import Occupancy, Slots
from shared.contract.messages import ModelRecord
from shared.contract.model_config import Direct, ModelConfig, Oldest, SequenceBatching, StateSpec
from shared.statistics.metrics_config import FIRST_RESPONSE, MetricsConfig
from shared.statistics.reports import CustomFamily, ExecutorReport, GpuReport, HostReport, ModelReport
from shared.statistics.reports import Sample as CustomSample
from shared.statistics.tally import (
    FULL_LOGS,
    GAINED_ROWS,
    HELD_BATCHES,
    FailureReason,
    MemoryUse,
    Timings,
    added,
    execution,
    failure,
    first_response,
    sketches,
    statistics_of,
    success,
)
from shared.store.waiting_line import WaitingLine

TIMES = Timings(1_000_000, 7_000_000, 2_000_000)
EVERYTHING = MetricsConfig(summary_latencies=True, histogram_latencies=True, quantiles=(0.5, 0.99))

COUNTERS = {
    "nv_inference_request_success": 4,
    "nv_inference_count": 6,
    "nv_inference_exec_count": 1,
    "nv_inference_request_duration_us": 39_030,
    "nv_inference_queue_duration_us": 6_010,
    "nv_inference_compute_input_duration_us": 3_000,
    "nv_inference_compute_infer_duration_us": 21_000,
    "nv_inference_compute_output_duration_us": 6_000,
    "nv_cache_num_hits_per_model": 1,
    "nv_cache_num_misses_per_model": 1,
    "nv_cache_hit_duration_per_model": 5,
    "nv_cache_miss_duration_per_model": 9,
}
SUMMARIES = (
    "nv_inference_request_summary_us",
    "nv_inference_queue_summary_us",
    "nv_inference_compute_input_summary_us",
    "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_output_summary_us",
    "nv_cache_hit_summary_per_model",
    "nv_cache_miss_summary_per_model",
)
GAUGES = ("nv_inference_pending_request_count", "nv_model_load_duration_secs")


def config(name: str, **more: object) -> ModelConfig:
    return ModelConfig(name, "python", "", 8, (), (), **more)  # type: ignore[arg-type]


CACHED = ModelRecord(config("cached", response_cache=True, metric_tags={"team": "a"}), "{}", ("1",))
PLAIN = ModelRecord(config("plain"), "{}", ("3",))


def counts() -> dict[str, int]:
    """Three requests of two rows each in one batch, one from the cache, one that failed."""
    parts = [success(rows=2, total_ns=13_000_000, queue_ns=2_000_000, compute=TIMES) for _ in range(3)]
    durations = {"request": 13_000_000, "queue": 2_000_000, **dict(TIMES.items())}
    return added(
        [
            *parts,
            *(sketches(durations) for _ in parts),
            *(first_response(ns, (100.0, 500.0)) for ns in (13_000_000, 100_000_000, 900_000_000)),
            execution(batch_size=8, compute=TIMES, ended_ms=5),
            {"success_count": 1, "success_ns": 30_000, "queue_ns": 10_000, "cache_hit_count": 1, "cache_hit_ns": 5_000},
            {"cache_miss_count": 1, "cache_miss_ns": 9_000},
            failure(FailureReason.REJECTED, total_ns=1),
        ]
    )


def observed(reports: Sequence[ExecutorReport] = ()) -> Observed:
    return Observed(reports, {("cached", "1"): 7})


def page(families: Sequence[Family]) -> dict[str, tuple[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]]:
    """Family -> type and samples, by Prometheus' own parser (which gives a counter the suffix that Triton's lack)."""
    text = "\n".join(line for family in families for line in family.lines()) + "\n"
    return {
        family.name: (
            family.type,
            {
                (sample.name.removesuffix("_total"), tuple(sorted(sample.labels.items()))): sample.value
                for sample in family.samples
            },
        )
        for family in text_string_to_metric_families(text)
    }


def models(metrics: MetricsConfig = EVERYTHING) -> list[Family]:
    statistics = [statistics_of("cached", "1", counts()), statistics_of("plain", "3", {})]
    reports = [
        ExecutorReport("a", "h", HostReport(0.5, 10, 4), (ModelReport("cached", "1", load_seconds=seconds),))
        for seconds in (1.5, 2.5)
    ]
    return inference_families(shown(statistics, {"cached": CACHED, "plain": PLAIN}, observed(reports)), metrics)


LABELS = (("_team", "a"), ("model", "cached"), ("version", "1"))


def test_counters_have_tritons_names_types_and_labels() -> None:
    read = page(models())

    for name, value in COUNTERS.items():
        kind, samples = read[name]
        assert ("counter", value) == (kind, samples[name, LABELS]), name


def test_what_virtual_slots_do_is_counted_where_the_model_has_them() -> None:
    batching = SequenceBatching(Direct(), 1, states=(StateSpec("in", "out", "FP32", (1,)),))
    paged = ModelRecord(config("paged", sequence_batching=batching), "{}", ("1",))
    line = WaitingLine()
    for name, number in (("w", 3), ("s:1", 4), ("out:1", 9), ("in:1", 5), ("gone:1", 1), ("out:2", 7)):
        line.add(name, number)
    seen = Observed([], {}, lines={"paged": line})
    statistics = [statistics_of("paged", "1", counts()), statistics_of("plain", "3", {})]

    read = page(inference_families(shown(statistics, {"paged": paged, "plain": PLAIN}, seen), EVERYTHING))

    labels = (("model", "paged"), ("version", "1"))
    assert ("counter", {("seqmesh_paged_out", labels): 9}) == read["seqmesh_paged_out"]
    assert ("counter", {("seqmesh_paged_in", labels): 5}) == read["seqmesh_paged_in"]
    assert ("gauge", {("seqmesh_paged_sequences", labels): 3}) == read["seqmesh_paged_sequences"]


def test_batches_that_waited_are_counted_with_what_they_gained() -> None:
    stateful = ModelRecord(config("stateful", sequence_batching=SequenceBatching(Direct(), 1)), "{}", ("1",))
    statistics = [statistics_of("stateful", "1", {HELD_BATCHES: 2, GAINED_ROWS: 3})]

    read = page(inference_families(shown(statistics, {"stateful": stateful}, Observed([], {})), EVERYTHING))

    labels = (("model", "stateful"), ("version", "1"))
    assert ("counter", {("seqmesh_batches_held", labels): 2}) == read["seqmesh_batches_held"]
    assert ("counter", {("seqmesh_batch_rows_gained", labels): 3}) == read["seqmesh_batch_rows_gained"]


def test_sequences_and_slots_are_shown_once_for_all_versions_of_a_model() -> None:
    batching = SequenceBatching(Direct(), 1)
    stateful = ModelRecord(config("stateful", sequence_batching=batching, metric_tags={"team": "a"}), "{}", ("1", "2"))
    line = WaitingLine()
    line.add("w", 2)
    slots = {"executor-1": Slots(8, 5), "executor-2": Slots(8)}
    seen = Observed([], {}, lines={"stateful": line}, occupancies={"stateful": Occupancy(9, slots)})
    statistics = [statistics_of("stateful", version, {}) for version in "12"]

    read = page(inference_families(shown(statistics, {"stateful": stateful}, seen), EVERYTHING))

    tag, model = ("_team", "a"), ("model", "stateful")
    assert ("gauge", {("seqmesh_live_sequences", (tag, model)): 9}) == read["seqmesh_live_sequences"]
    assert ("gauge", {("seqmesh_waiting_sequences", (tag, model)): 2}) == read["seqmesh_waiting_sequences"]
    for name, values in (("seqmesh_slots", (8, 8)), ("seqmesh_slots_used", (5, 0))):
        samples = zip(slots, values, strict=True)
        assert ("gauge", {(name, (tag, ("executor", each), model)): value for each, value in samples}) == read[name]


def test_rows_are_counted_without_null_rows_beside_those_that_batches_had_room_for() -> None:
    runs = [
        execution(batch_size=size, compute=TIMES, ended_ms=5, null_rows=null) for size, null in ((8, 3), (8, 0), (2, 1))
    ]
    statistics = [statistics_of("cached", "1", added(runs)), statistics_of("plain", "3", {})]

    read = page(inference_families(shown(statistics, {"cached": CACHED, "plain": PLAIN}, observed()), EVERYTHING))

    plain = (("model", "plain"), ("version", "3"))
    for name, value in (("seqmesh_batch_rows", 14), ("seqmesh_batch_rows_possible", 24)):
        assert ("counter", {(name, LABELS): value, (name, plain): 0}) == read[name]
    name = "seqmesh_batch_fill_ratio"
    assert ("gauge", {(name, LABELS): 14 / 24, (name, plain): 0}) == read[name]


def test_takeovers_and_refused_commits_are_counted_of_sequence_models() -> None:
    stateful = ModelRecord(config("stateful", sequence_batching=SequenceBatching(Direct(), 1)), "{}", ("1",))
    line = WaitingLine()
    for name, number in (("lost:1", 3), ("leaving:1", 4), ("moved:1", 5), ("refused:1", 6), ("refused:2", 7)):
        line.add(name, number)
    seen = Observed([], {}, lines={"stateful": line})
    statistics = [statistics_of("stateful", "1", counts()), statistics_of("plain", "3", {})]

    read = page(inference_families(shown(statistics, {"stateful": stateful, "plain": PLAIN}, seen), EVERYTHING))

    labels = (("model", "stateful"), ("version", "1"))
    assert ("counter", {("seqmesh_commits_refused", labels): 6}) == read["seqmesh_commits_refused"]
    assert (
        "counter",
        {
            ("seqmesh_takeovers", (("cause", cause), *labels)): count
            for cause, count in (("lost", 3), ("leaving", 4), ("moved", 5))
        },
    ) == read["seqmesh_takeovers"]


def test_a_failure_counts_under_its_reason_and_all_four_are_there_from_the_start() -> None:
    kind, samples = page(models())["nv_inference_request_failure"]

    def of(model: str, version: str, tags: tuple[tuple[str, str], ...] = ()) -> dict[str, float]:
        return {
            reason: samples[
                "nv_inference_request_failure",
                (*tags, ("model", model), ("reason", reason), ("version", version)),
            ]
            for reason in FailureReason
        }

    assert "counter" == kind
    assert {"REJECTED": 1, "CANCELED": 0, "BACKEND": 0, "OTHER": 0} == of("cached", "1", (("_team", "a"),))
    assert dict.fromkeys(FailureReason, 0) == of("plain", "3")


def test_labels_are_written_in_the_order_of_their_names() -> None:
    lines = [line for family in models() for line in family.lines()]

    assert 'nv_inference_request_failure{_team="a",model="cached",reason="REJECTED",version="1"} 1' in lines


def test_gauges_show_what_waits_and_what_loading_took() -> None:
    read = page(models())

    assert [("gauge", 7), ("gauge", 2.5)] == [(read[name][0], read[name][1][name, LABELS]) for name in GAUGES]


def test_cache_metrics_are_shown_of_models_with_a_cache() -> None:
    of_cache = {name: samples for name, (_, samples) in page(models()).items() if name.startswith("nv_cache")}

    assert 6 == len(of_cache)
    assert not any(("model", "plain") in labels for samples in of_cache.values() for _, labels in samples)


def test_latencies_are_counters_unless_more_or_less_is_asked_for() -> None:
    less = page(models(MetricsConfig(counter_latencies=False)))
    usual = page(models(MetricsConfig()))

    assert not any("duration_us" in name for name in less)
    assert not set(SUMMARIES) & set(usual)
    assert FIRST_RESPONSE not in usual


def test_help_texts_of_durations_say_whether_cached_requests_count() -> None:
    told = {family.name: family.help for family in models() if family.name.endswith("_duration_us")}

    assert {name: "compute" in name for name in told} == {name: "does not include" in told[name] for name in told}
    assert all(text.endswith("include cached requests)") or "(includes cached" in text for text in told.values())


def test_summaries_have_quantiles_sum_and_count() -> None:
    read = page(models())

    for name in SUMMARIES:
        kind, samples = read[name]
        assert "summary" == kind
        assert {("quantile", "0.5"), ("quantile", "0.99")} == {
            label for _, labels in samples for label in labels if label[0] == "quantile"
        }
    samples = read["nv_inference_compute_infer_summary_us"][1]
    name = "nv_inference_compute_infer_summary_us"
    assert (21_000, 3) == (samples[f"{name}_sum", LABELS], samples[f"{name}_count", LABELS])
    labels = (("_team", "a"), ("model", "cached"), ("quantile", "0.5"), ("version", "1"))
    assert math.isclose(7_000, samples[name, labels], rel_tol=0.04)
    plain = (("model", "plain"), ("quantile", "0.5"), ("version", "3"))
    assert math.isnan(samples[name, plain])


def test_the_histogram_of_first_responses_adds_its_buckets_up() -> None:
    own = {FIRST_RESPONSE: (100.0, 500.0)}
    record = ModelRecord(config("cached", histogram_buckets=own), "{}", ("1",))
    read = page(
        inference_families(shown([statistics_of("cached", "1", counts())], {"cached": record}, observed()), EVERYTHING)
    )
    kind, samples = read[FIRST_RESPONSE]

    def value(suffix: str, **le: str) -> float:
        return samples[f"{FIRST_RESPONSE}{suffix}", tuple(sorted({"model": "cached", "version": "1", **le}.items()))]

    assert "histogram" == kind
    assert [2, 2, 3] == [value("_bucket", le=le) for le in ("100", "500", "+Inf")]
    assert (1013, 3) == (value("_sum"), value("_count"))


def test_a_model_s_label_may_be_any_text() -> None:
    tags = {"quote": 'a"b\\c\nd'}
    record = ModelRecord(config("plain", metric_tags=tags), "{}", ("3",))
    read = page(inference_families(shown([statistics_of("plain", "3", {})], {"plain": record}, observed()), EVERYTHING))

    labels = (("_quote", tags["quote"]), ("model", "plain"), ("version", "3"))
    assert 0 == read["nv_inference_count"][1]["nv_inference_count", labels]


def test_each_machine_and_gpu_is_shown_once() -> None:
    gpu = GpuReport("GPU-1", 0.25, 80, 20, 300.5, 700.0, 12.5)
    poor = GpuReport("GPU-2", 0.5, 8, 2)
    reports = [
        ExecutorReport("a", "one", HostReport(0.5, 100, 40), gpus=(gpu,)),
        ExecutorReport("b", "one", HostReport(0.5, 100, 40), gpus=(gpu,)),
        ExecutorReport("c", "two", HostReport(0.1, 200, 50), gpus=(poor,)),
    ]
    read = page(hardware_families(observed(reports)))

    expected = {
        "nv_cpu_utilization": ("gauge", {"one": 0.5, "two": 0.1}),
        "nv_cpu_memory_total_bytes": ("gauge", {"one": 100, "two": 200}),
        "nv_cpu_memory_used_bytes": ("gauge", {"one": 40, "two": 50}),
        "nv_pinned_memory_pool_total_bytes": ("gauge", {"one": 0, "two": 0}),
        "nv_pinned_memory_pool_used_bytes": ("gauge", {"one": 0, "two": 0}),
        "nv_gpu_utilization": ("gauge", {"GPU-1": 0.25, "GPU-2": 0.5}),
        "nv_gpu_memory_total_bytes": ("gauge", {"GPU-1": 80, "GPU-2": 8}),
        "nv_gpu_memory_used_bytes": ("gauge", {"GPU-1": 20, "GPU-2": 2}),
        "nv_gpu_power_usage": ("gauge", {"GPU-1": 300.5}),
        "nv_gpu_power_limit": ("gauge", {"GPU-1": 700.0}),
        "nv_energy_consumption": ("counter", {"GPU-1": 12.5}),
    }
    assert expected == {
        name: (kind, {labels[0][1]: value for (_, labels), value in samples.items()})
        for name, (kind, samples) in read.items()
    }


def test_metrics_of_models_on_several_executors_are_added() -> None:
    family = CustomFamily(
        "calls",
        "counter",
        "Calls of\nthe model",
        (CustomSample("", {"kind": "a"}, 2.0), CustomSample("", {"kind": "b"}, 1.0)),
    )
    reports = [ExecutorReport(name, "h", HostReport(0, 1, 1), families=(family,)) for name in "ab"]

    assert {"calls": ("counter", {("calls", (("kind", "a"),)): 4.0, ("calls", (("kind", "b"),)): 2.0})} == page(
        custom_families(observed(reports))
    )


def test_memory_of_a_model_is_added_over_executors() -> None:
    cpu, gpu = MemoryUse("CPU", 0, 10), MemoryUse("GPU", 1, 5)
    reports = [
        ExecutorReport(name, "h", HostReport(0, 1, 1), (ModelReport("m", "1", memory=(gpu, cpu)),)) for name in "ab"
    ]

    assert {("m", "1"): [MemoryUse("CPU", 0, 20), MemoryUse("GPU", 1, 10)]} == memory_of(reports)


def test_the_cache_is_told_of_where_there_is_one() -> None:
    statistics = [statistics_of("cached", "1", counts()), statistics_of("plain", "3", {})]
    seen = Observed((), {}, CacheUse(size_bytes=400, bytes=100, entries=7, evicted=3))
    models = shown(statistics, {"cached": CACHED, "plain": PLAIN}, seen)

    read = page(cache_families(models, seen))

    assert {"gauge"} == {kind for kind, _ in read.values()}
    assert {
        "nv_cache_util": 0.25,
        "nv_cache_num_entries": 7,
        "nv_cache_num_hits": 1,
        "nv_cache_num_misses": 1,
        "nv_cache_num_lookups": 2,
        "nv_cache_num_evictions": 3,
        "nv_cache_lookup_duration": 14,
    } == {name: samples[name, ()] for name, (_, samples) in read.items()}
    assert [] == cache_families(models, observed())


def test_full_logs_are_counted_of_models_that_replay() -> None:
    batching = SequenceBatching(Oldest(4), 1_000_000)
    replaying = config("replaying", sequence_batching=batching, parameters={"sequence_recovery": "replay"})
    statistics = [statistics_of(name, "1", {FULL_LOGS: 3}) for name in ("replaying", "cached")]
    records = {"replaying": ModelRecord(replaying, "{}", ("1",)), "cached": CACHED}

    families = inference_families(shown(statistics, records, Observed((), {})), MetricsConfig())

    (family,) = [each for each in families if each.name == "seqmesh_sequence_log_full"]
    assert [({"model": "replaying", "version": "1"}, 3)] == [(each.labels, each.value) for each in family.samples]


def test_what_could_not_be_read_is_counted_by_kind_of_key() -> None:
    (family,) = unreadable_families(Observed((), {}, unreadable={"seq": 2, "checkpoint": 1}))

    assert ["seqmesh_unreadable_values_total", [{"kind": "checkpoint"}, {"kind": "seq"}]] == [
        family.name,
        [sample.labels for sample in family.samples],
    ]
    assert [] == unreadable_families(Observed((), {}))
