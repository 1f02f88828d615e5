"""Metrics with Triton's names and labels (triton-spec 7), made from statistics and observations of the mesh. Pure.

Beside them those of batches, slots, paging and takeovers, with the prefix `seqmesh_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.models.catalog import Place
from gateway.models.exposition import Family, number_family
from gateway.models.observation import Observed, each_model
from gateway.models.occupancy import Occupancy, Slots
from shared.contract.messages import ModelRecord
from shared.statistics.metrics_config import FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS, MetricsConfig, quantile_of
from shared.statistics.reports import GpuReport, Sample, merged_families
from shared.statistics.tally import (
    FULL_LOGS,
    GAINED_ROWS,
    HELD_BATCHES,
    ModelStatistics,
    first_response_of,
    sketch_of,
)
from shared.store.waiting_line import TAKEOVER_CAUSES, WaitingLine


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything that is shown about one READY model version.

    labels   model, version, and the tags of its configuration
    pending  requests that wait
    line     sequences of the model that wait for a slot
    occupancy  live sequences and slots of the model
    """

    labels: dict[str, str]
    version: str
    statistics: ModelStatistics
    record: ModelRecord
    pending: int
    load_seconds: float
    line: WaitingLine
    occupancy: Occupancy


def shown(statistics: Sequence[ModelStatistics], records: Mapping[str, ModelRecord], observed: Observed) -> list[Shown]:
    """Gathers what is shown about each version. Where several executors have loaded it, the slowest load counts."""
    load_seconds: dict[Place, float] = {}
    for report in each_model(observed.reports):
        served = (report.model, report.version)
        load_seconds[served] = max(report.load_seconds, load_seconds.get(served, 0.0))
    return [
        Shown(
            labels={
                "model": each.name,
                "version": each.version,
                **{f"_{name}": value for name, value in records[each.name].config.metric_tags.items()},
            },
            version=each.version,
            statistics=each,
            record=records[each.name],
            pending=observed.pending.get((each.name, each.version), 0),
            load_seconds=load_seconds.get((each.name, each.version), 0.0),
            line=observed.lines.get(each.name) or WaitingLine(),
            occupancy=observed.occupancies.get(each.name) or Occupancy(),
        )
        for each in statistics
        if each.name in records
    ]


def inference_families(models: Sequence[Shown], config: MetricsConfig) -> list[Family]:
    """All families with the labels of a model."""
    cached = [each for each in models if _is_cached(each)]
    sequences = [each for each in models if each.record.config.sequence_batching is not None]
    replaying = [each for each in models if each.record.config.replays]
    success, *counters = [_family(models, "counter", *text) for text in COUNTERS]
    families = [success, _failures(models), *counters]
    if config.counter_latencies:
        families += [_family(models, "counter", name, f"Cumulative {text}", _us(of)) for name, _, text, of in STAGES]
        families += _families_of(cached, CACHED)
    families += [_family(models, "gauge", *text) for text in GAUGES]
    families += [*_families_of(models, BATCHES), *_families_of(replaying, REPLAYED)]
    if sequences:
        families += [*_occupancies(sequences), _takeovers(sequences)]
    families += _families_of(sequences, SEQUENCES)
    families += _paging([each for each in models if each.record.config.pageable])
    if config.summary_latencies:
        families += [_summary(models, config.quantiles, name, text, of) for _, name, text, of in STAGES]
        families += [_summary(cached, config.quantiles, *text) for text in CACHE_SUMMARIES]
    if config.histogram_latencies:
        families.append(_first_response(models))
    return families


Labelled = Sequence[tuple[Mapping[str, str], float]]
Text = tuple[str, str, Callable[[Shown], float]]
"""A family with one sample per model version: name, help text, value."""


def _times(of: str) -> Callable[[Shown], float]:
    return lambda each: each.statistics.durations[of].count


def _us(of: str) -> Callable[[Shown], float]:
    return lambda each: each.statistics.durations[of].ns // 1000


def _counted(field: str) -> Callable[[Shown], float]:
    return lambda each: each.statistics.counts.get(field, 0)


def _possible_rows(each: Shown) -> int:
    return each.statistics.execution_count * max(1, each.record.config.max_batch_size)


COUNTERS: Sequence[Text] = (
    ("nv_inference_request_success", "Number of successful inference requests, all batch sizes", _times("success")),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda each: each.statistics.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda each: each.statistics.execution_count,
    ),
)
GAUGES: Sequence[Text] = (
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda each: each.pending,
    ),
    ("nv_model_load_duration_secs", "Time to load the model in seconds", lambda each: each.load_seconds),
    (
        "seqmesh_batch_fill_ratio",
        "Share of the rows of batches that were filled, 0 to 1, since the version was loaded; 0 before the first one",
        lambda each: each.statistics.rows / max(1, _possible_rows(each)),
    ),
)
BATCHES: Sequence[Text] = (
    (
        "seqmesh_batch_rows_total",
        "Rows of all batches, without those that no request filled",
        lambda each: each.statistics.rows,
    ),
    (
        "seqmesh_batch_rows_possible_total",
        "Rows that the same batches had room for: max_batch_size each",
        _possible_rows,
    ),
)
CACHED: Sequence[Text] = (
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", _times("cache_hit")),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", _times("cache_miss")),
    ("nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds", _us("cache_hit")),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        _us("cache_miss"),
    ),
)
REPLAYED: Sequence[Text] = (
    (
        "seqmesh_sequence_log_full",
        "Number of sequences that stopped being recoverable because their log of steps reached its bound",
        _counted(FULL_LOGS),
    ),
)
SEQUENCES: Sequence[Text] = (
    (
        "seqmesh_commits_refused_total",
        "Steps that executors ran for sequences that were not theirs any more",
        lambda each: each.line.refused[each.version],
    ),
    (
        "seqmesh_batches_held_total",
        "Batches that waited for sequences that were about to come back",
        _counted(HELD_BATCHES),
    ),
    ("seqmesh_batch_rows_gained_total", "Rows that came while their batch waited for them", _counted(GAINED_ROWS)),
)
STAGES = (
    (
        "nv_inference_request_duration_us",
        "nv_inference_request_summary_us",
        "inference request duration in microseconds (includes cached requests)",
        "success",
    ),
    (
        "nv_inference_queue_duration_us",
        "nv_inference_queue_summary_us",
        "inference queuing duration in microseconds (includes cached requests)",
        "queue",
    ),
    (
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_input_summary_us",
        "compute input duration in microseconds (does not include cached requests)",
        "compute_input",
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_infer_summary_us",
        "compute inference duration in microseconds (does not include cached requests)",
        "compute_infer",
    ),
    (
        "nv_inference_compute_output_duration_us",
        "nv_inference_compute_output_summary_us",
        "inference compute output duration in microseconds (does not include cached requests)",
        "compute_output",
    ),
)
"""Names of the counter and of the summary, what both show, and the name of the duration in the statistics."""
CACHE_SUMMARIES = (
    ("nv_cache_hit_summary_per_model", "cache hit duration per model in microseconds", "cache_hit"),
    ("nv_cache_miss_summary_per_model", "cache miss duration per model in microseconds", "cache_miss"),
)


def _family(models: Sequence[Shown], kind: str, name: str, text: str, value: Callable[[Shown], float]) -> Family:
    return Family(name, kind, text, [Sample("", each.labels, value(each)) for each in models])


def _families_of(models: Sequence[Shown], texts: Iterable[Text]) -> list[Family]:
    """Counters of models of one kind; none where there is no such model."""
    return [_family(models, "counter", *text) for text in texts] if models else []


def counter(models: Sequence[Shown], name: str, text: str, of: Callable[[Shown], Labelled]) -> Family:
    """A counter with several samples of a version. of: further labels of each, and its value"""
    samples = [Sample("", {**each.labels, **labels}, value) for each in models for labels, value in of(each)]
    return Family(name, "counter", text, samples)


def _failures(models: Sequence[Shown]) -> Family:
    return counter(
        models,
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        lambda each: [({"reason": reason}, count) for reason, count in each.statistics.failures.items()],
    )


PAGING: Sequence[tuple[str, str, Callable[[WaitingLine], Mapping[str, int]]]] = (
    ("seqmesh_paged_out_total", "Times that a sequence gave up its slot", lambda line: line.paged_out),
    ("seqmesh_paged_in_total", "Times that a paged sequence wanted a slot", lambda line: line.paged_in),
    ("seqmesh_paged_sequences", "Live sequences that hold no slot and want none", lambda line: line.paged),
)
"""Of models with virtual slots: name, help text, and the counts by version."""


def _paging(models: Sequence[Shown]) -> list[Family]:
    return [
        number_family(name, text, [Sample("", each.labels, of(each.line).get(each.version, 0)) for each in models])
        for name, text, of in PAGING
        if models
    ]


OCCUPANCIES: Sequence[tuple[str, str, Callable[[Shown], int]]] = (
    (
        "seqmesh_live_sequences",
        "Sequences that were answered once and are not over, in a slot or without one",
        lambda each: each.occupancy.live,
    ),
    ("seqmesh_waiting_sequences", "Sequences that wait for their first slot", lambda each: each.line.first),
)
SLOTS: Sequence[tuple[str, str, Callable[[Slots], int]]] = (
    ("seqmesh_slots", "Slots for sequences that an executor offers", lambda slots: slots.offered),
    ("seqmesh_slots_used", "Slots of an executor that sequences hold", lambda slots: slots.used),
)
"""Of models with sequences, all versions together: name, help text, value."""


def _occupancies(models: Sequence[Shown]) -> list[Family]:
    each_once = {each.statistics.name: each for each in models}.values()
    labelled = [({name: text for name, text in each.labels.items() if name != "version"}, each) for each in each_once]
    families = [
        Family(name, "gauge", text, [Sample("", labels, value(each)) for labels, each in labelled])
        for name, text, value in OCCUPANCIES
    ]
    for name, text, of in SLOTS:
        samples = [
            Sample("", {**labels, "executor": executor}, of(slots))
            for labels, each in labelled
            for executor, slots in sorted(each.occupancy.slots.items())
        ]
        families.append(Family(name, "gauge", text, samples))
    return families


def _takeovers(models: Sequence[Shown]) -> Family:
    return counter(
        models,
        "seqmesh_takeovers_total",
        "Times that a sequence was taken over from its owner",
        lambda each: [({"cause": cause}, each.line.taken_over[each.version, cause]) for cause in TAKEOVER_CAUSES],
    )


def cache_families(models: Sequence[Shown], observed: Observed) -> list[Family]:
    """Families of the response cache, over all READY models and all shards; none where there is no cache.

    Triton's `nv_cache_insertion_duration` is left out: the script that sends an answer also stores it, so there is no
    insertion to be measured by itself.
    """
    cache = observed.cache
    if cache is None:
        return []
    hits, misses = ([each.statistics.durations[name] for each in models] for name in ("cache_hit", "cache_miss"))
    hit_count, miss_count = (sum(each.count for each in durations) for durations in (hits, misses))
    lookup_us = sum(each.ns for each in [*hits, *misses]) // 1000
    values = (
        ("nv_cache_util", "Cache utilization [0.0 - 1.0]", cache.bytes / cache.size_bytes),
        ("nv_cache_num_entries", "Number of responses stored in response cache", cache.entries),
        ("nv_cache_num_hits", "Number of cache hits in response cache", hit_count),
        ("nv_cache_num_misses", "Number of cache misses in response cache", miss_count),
        ("nv_cache_num_lookups", "Number of cache lookups in response cache", hit_count + miss_count),
        ("nv_cache_num_evictions", "Number of cache evictions in response cache", cache.evicted),
        ("nv_cache_lookup_duration", "Total cache lookup duration (hit and miss), in microseconds", lookup_us),
    )
    return [Family(name, "gauge", text, [Sample("", {}, value)]) for name, text, value in values]


def _is_cached(shown: Shown) -> bool:
    """Whether the model's answers may come from the cache. Those of an ensemble do not."""
    config = shown.record.config
    return config.response_cache and not config.ensemble


def _summary(models: Sequence[Shown], quantiles: Sequence[float], name: str, text: str, of: str) -> Family:
    samples: list[Sample] = []
    for each in models:
        sketch = sketch_of(each.statistics.counts, "request" if of == "success" else of)
        total = each.statistics.durations[of]
        samples += [
            Sample("", {**each.labels, "quantile": f"{quantile:g}"}, quantile_of(sketch, quantile))
            for quantile in quantiles
        ]
        samples += [Sample("_sum", each.labels, total.ns // 1000), Sample("_count", each.labels, total.count)]
    return Family(name, "summary", f"Summary of {text}", samples)


def _first_response(models: Sequence[Shown]) -> Family:
    samples: list[Sample] = []
    for each in models:
        bounds = each.record.config.histogram_buckets.get(FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS)
        counts, total_ms = first_response_of(each.statistics.counts, len(bounds) + 1)
        upto = 0
        for bound, count in zip([*(f"{bound:g}" for bound in bounds), "+Inf"], counts, strict=True):
            upto += count
            samples.append(Sample("_bucket", {**each.labels, "le": bound}, upto))
        samples += [Sample("_sum", each.labels, total_ms), Sample("_count", each.labels, upto)]
    return Family(FIRST_RESPONSE, "histogram", "Duration from request to first response in milliseconds", samples)


# -- hardware ----------------------------------------------------------------------------------------------------


GPU_TEXTS: Sequence[tuple[str, str, str, Callable[[GpuReport], float | None]]] = (
    ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", lambda gpu: gpu.memory_total),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", lambda gpu: gpu.memory_used),
    ("nv_gpu_power_usage", "gauge", "GPU power usage in watts", lambda gpu: gpu.power_usage),
    ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts", lambda gpu: gpu.power_limit),
    (
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        lambda gpu: gpu.energy,
    ),
)


def hardware_families(observed: Observed) -> list[Family]:
    """Families of the executors' machines and GPUs. A machine with several executors is shown once.

    The label `host` is the mesh's own: Triton knows only one machine.
    """
    machines = {report.host: report.machine for report in observed.reports}
    gpus = {gpu.uuid: gpu for report in observed.reports for gpu in report.gpus}

    def host(name: str, text: str, value: Callable[[str], float]) -> Family:
        return Family(name, "gauge", text, [Sample("", {"host": each}, value(each)) for each in sorted(machines)])

    families = [
        host("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", lambda each: machines[each].cpu_utilization),
        host("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", lambda each: machines[each].memory_total),
        host("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", lambda each: machines[each].memory_used),
        # The mesh keeps no pool of pinned memory; Triton shows its own on every machine.
        host("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", lambda _: 0),
        host("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", lambda _: 0),
    ]
    for name, kind, text, value in GPU_TEXTS:
        told = [(uuid, value(gpus[uuid])) for uuid in sorted(gpus)]
        samples = [Sample("", {"gpu_uuid": uuid}, amount) for uuid, amount in told if amount is not None]
        if samples:
            families.append(Family(name, kind, text, samples))
    return families


def unreadable_families(observed: Observed) -> list[Family]:
    """The count of values in Redis that could not be read, by kind of key (`shared.store.reading`); none if all could
    be read."""
    samples = [Sample("", {"kind": kind}, count) for kind, count in sorted(observed.unreadable.items())]
    text = "Number of values in Redis that could not be read, by kind of key"
    return [number_family("seqmesh_unreadable_values_total", text, samples)] if samples else []


def custom_families(observed: Observed) -> list[Family]:
    """The families that python models define themselves, added up over all executors."""
    merged = merged_families(report.families for report in observed.reports)
    return [Family(each.name, each.kind, each.help, each.samples) for each in merged]
