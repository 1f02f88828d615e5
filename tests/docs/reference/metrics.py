"""metrics.md: every metric that `/metrics` can show, with its labels, and when it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from gateway.applications import gauges_of
from gateway.models.exposition import Family, number_family
from gateway.models.mesh_families import (
    executor_families,
    redis_families,
    request_families,
    sequence_families,
    tenant_families,
)
from gateway.models.metric_families import (
    cache_families,
    hardware_families,
    inference_families,
    shown,
    unreadable_families,
)
from gateway.models.metrics import MESH_UP
from gateway.models.observation import EXECUTOR_STATES, CacheUse, Observed
from gateway.models.occupancy import Occupancy, Slots
from gateway.models.redis_figures import CommandUse, RedisFigures
from shared.contract.messages import ModelRecord
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching, StateSpec
from shared.statistics.meter import OVER_QUOTA, ROUND_TRIP, SLOT_WAITS, Phase
from shared.statistics.metrics_config import MetricsConfig
from shared.statistics.reports import ExecutorReport, GpuReport, HostReport
from shared.statistics.tally import FailureReason, failure, statistics_of
from shared.store.script_values import StepOutcome
from shared.store.waiting_line import ENDS, TAKEOVER_CAUSES
from tests.docs.reference.markdown import code, page, table, text

HEAD = ("Metric", "Kind", "Labels", "When", "Meaning")
INTRO = """
Every gateway serves them at `/metrics` of its HTTP port and of its metrics port (`--metrics-port`), in Prometheus' text
format, and in OpenMetrics with exemplars for those who ask for it by `Accept`, as Prometheus does. What begins with
`nv_` has Triton's name, kind and labels, and is the mesh's: every gateway shows the same numbers, so scrape one
gateway, or aggregate with `max`. What begins with `seqmesh_gateway_` or `process_` is that process alone; all other
metrics with `seqmesh_` are the mesh's.

Metrics of models also have a label `_<tag>` for each of the model's `metric_tags`. A `python` model may have metrics of
its own; they are added up over all executors. One that is named like a metric of the mesh is left out, and the log of
the gateway says so. A counter of a model begins at 0 with each load of the model.
"""
PLAIN = ModelConfig("m", "python", "", 8, (), ())
STATE = (StateSpec("in", "out", "FP32", (1,)),)
GPU = GpuReport("u", utilization=0.5, memory_total=2, memory_used=1, power_usage=1, power_limit=2, energy=3)
FIGURES = RedisFigures(1, 1, 1, 1, 1, log_written=True, log_rewritten=True, commands={"fcall": CommandUse(1, 1)})
REPORT = ExecutorReport("e", "h", HostReport(0.5, 2, 1))


def families(
    *,
    sequences: bool = False,
    states: bool = False,
    cache: bool = False,
    metrics: MetricsConfig | None = None,
    **more: str,
) -> list[Family]:
    """What a mesh with one model shows. more: parameters of the model."""
    batching = SequenceBatching(Direct(), 1, states=STATE if states else ()) if sequences else None
    config = ModelConfig(
        "m", "python", "", 8, (), (), sequence_batching=batching, parameters=more, response_cache=cache
    )
    statistics = [statistics_of("m", "1", failure(FailureReason.OTHER, total_ns=1))]
    seen = Observed([REPORT], {}, occupancies={"m": Occupancy(slots={"e": Slots()})}, unserved=frozenset("m"))
    models = shown(statistics, {"m": ModelRecord(config, "{}", ("1",))}, seen)
    return [
        *inference_families(models, metrics or MetricsConfig()),
        *request_families(models, {}),
        *sequence_families(models, ()),
        *hardware_families(seen),
        *executor_families(seen),
        *redis_families({"": FIGURES}, {f"{ROUND_TRIP}gateway/submit:0": 1}),
    ]


def kinds_of_meshes() -> Iterable[tuple[str, Sequence[Family]]]:
    """What a mesh shows, by what it must have; the first that shows a metric says when it is there."""
    gpus = Observed([ExecutorReport("e", "h", HostReport(0.5, 2, 1), gpus=(GPU,))], {})
    yield "unless `counter_latencies=false`", families()
    yield "always", families(metrics=MetricsConfig(counter_latencies=False))
    yield "models with sequences", families(sequences=True)
    yield "models whose state the mesh holds, with virtual slots", families(sequences=True, states=True)
    yield "models with `sequence_recovery: replay`", families(sequences=True, sequence_recovery="replay")
    yield "models with `response_cache`", families(cache=True)
    yield "gateways with `--cache-config`", cache_families([], Observed([], {}, cache=CacheUse(1, 0, 0, 0)))
    yield "`summary_latencies=true`", families(metrics=MetricsConfig(summary_latencies=True))
    yield "`summary_latencies=true`", families(metrics=MetricsConfig(summary_latencies=True), cache=True)
    yield "`histogram_latencies=true`", families(metrics=MetricsConfig(histogram_latencies=True))
    yield "executors with GPUs", hardware_families(gpus)
    yield "tenants with limits of their own", tenant_families({"t": 1}, {f"{OVER_QUOTA}t": 1})
    yield "a value in Redis could not be read", unreadable_families(Observed([], {}, unreadable={"seq": 1}))


def metrics() -> str:
    """The page."""
    found: dict[str, tuple[str, Family]] = {}
    for when, there in kinds_of_meshes():
        for family in there:
            before = found.get(family.name)
            if before is None or not before[1].samples or when == "always":
                found[family.name] = when, family
    models = [row(when, family) for when, family in found.values() if is_of_models(family)]
    mesh = [row(when, family) for when, family in found.values() if not is_of_models(family)]
    own = [[code(name), kind, "", "always", text(told)] for name, kind, told in own_metrics()]
    return page(
        "Metrics",
        INTRO,
        "## Models",
        "The words `..._latencies` are items of `--metrics-config`.",
        table(HEAD, models),
        f"`cause` of a takeover: {', '.join(map(code, TAKEOVER_CAUSES))}. The owner had died, was leaving in order, or "
        "lives on and gave its slot up.",
        f"`reason` of a failure: {', '.join(map(code, FailureReason))}.",
        f"`phase` of a request: {', '.join(map(code, Phase))}; see [Monitoring](../guides/monitoring.md#dashboards).",
        f"`outcome` of a step: {', '.join(code(outcome.name.lower()) for outcome in StepOutcome)}.",
        f"`reason` of a sequence's end: {', '.join(map(code, ENDS.values()))}.",
        f"`cause` of a wait for a slot: {', '.join(map(code, SLOT_WAITS))}. The sequence began, lost its owner, or had "
        "lent its slot to another one.",
        "## The response cache, machines, executors, Redis",
        table(HEAD, mesh),
        f"`state` of an executor: {', '.join(map(code, EXECUTOR_STATES))}. It serves; leaves in order; its lease has "
        "ended without that; an operator has emptied it.",
        "What a Redis Cluster tells of itself has a label `node` as well: the address of the node.",
        "## One gateway",
        table(HEAD, own),
    )


def is_of_models(family: Family) -> bool:
    """Whether each sample is one model's."""
    return bool(family.samples) and "model" in family.samples[0].labels


def own_metrics() -> Iterable[tuple[str, str, str]]:
    """A gateway's own: name, kind and help."""
    nobody: Any = None
    for name, told in (MESH_UP, *((gauge.name, gauge.help) for gauge in gauges_of(nobody, nobody, nobody))):
        yield name, number_family(name, told).kind, told
    for family in ProcessCollector(registry=CollectorRegistry()).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, family.documentation


def row(when: str, family: Family) -> list[str]:
    """One metric. A summary and a histogram have further samples, with suffixes."""
    assert family.samples, family.name
    labels = sorted({label for sample in family.samples for label in sample.labels})
    suffixes = sorted({sample.suffix for sample in family.samples if sample.suffix})
    name = code(family.name) + "".join(f", {code(suffix)}" for suffix in suffixes)
    return [name, family.kind, ", ".join(map(code, labels)), when, text(family.help)]
