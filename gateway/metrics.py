"""Prometheus metrics of the mesh's models and of this gateway, made when they are asked for.

The `nv_inference_` family has Triton's names and labels (triton-spec 7). Its counters are the mesh's, summed over all
executors in Redis: every gateway reports the same, so scrape one, or aggregate with `max`. `seqmesh_gateway_` is this
process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway.statistics import Statistics
from shared import logs
from shared.errors import MeshError
from shared.tally import ModelStatistics, Reason

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples. prometheus_client would rename counters: it insists on the suffix `_total`."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Labels, float]]

    def lines(self) -> Iterable[str]:
        """Prometheus' text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
            yield f"{self.name}{{{inside}}} {value!r}" if inside else f"{self.name} {value!r}"


def escaped(text: str) -> str:
    """A label's value between its quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of this gateway that is read at every scrape."""

    name: str
    kind: str
    help: str
    read: Callable[[], float]


class Metrics:
    """Renders everything that `/metrics` shows."""

    def __init__(self, statistics: Statistics, gauges: Sequence[Gauge]) -> None:
        self._statistics = statistics
        self._gauges = gauges
        self._process: Any = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """The page. Without Redis the mesh's part is missing, and the page says so by `seqmesh_gateway_mesh_up` 0."""
        try:
            families = mesh_families(await self._statistics.read())
            up = 1.0
        except MeshError as error:
            logs.warning("metrics without the mesh's counters", error=error.message)
            families, up = [], 0.0
        families.append(
            Family("seqmesh_gateway_mesh_up", "gauge", "1 when this gateway can read the mesh in Redis", [({}, up)])
        )
        families += [Family(gauge.name, gauge.kind, gauge.help, [({}, gauge.read())]) for gauge in self._gauges]
        lines = [line for family in families for line in family.lines()]
        return "\n".join(lines).encode() + b"\n" + generate_latest(self._process)


def mesh_families(statistics: Sequence[ModelStatistics]) -> list[Family]:
    """The `nv_inference_` counters of every READY model version."""

    def counter(name: str, text: str, value: Callable[[ModelStatistics], float]) -> Family:
        samples = [({"model": each.name, "version": each.version}, value(each)) for each in statistics]
        return Family(f"nv_inference_{name}", "counter", text, samples)

    def microseconds(name: str, text: str, field: str) -> Family:
        return counter(f"{name}_duration_us", text, lambda each: each.durations[field].ns // 1000)

    failures = Family(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests",
        [
            ({"model": each.name, "reason": reason, "version": each.version}, each.failures.get(reason, 0))
            for each in statistics
            for reason in map(str, Reason)
        ],
    )
    return [
        counter(
            "request_success", "Number of successful inference requests", lambda each: each.durations["success"].count
        ),
        failures,
        counter("count", "Number of inferences performed", lambda each: each.inference_count),
        counter("exec_count", "Number of model executions performed", lambda each: each.execution_count),
        microseconds("request", "Cumulative inference request duration in microseconds", "success"),
        microseconds("queue", "Cumulative inference queuing duration in microseconds", "queue"),
        microseconds("compute_input", "Cumulative compute input duration in microseconds", "compute_input"),
        microseconds("compute_infer", "Cumulative compute inference duration in microseconds", "compute_infer"),
        microseconds(
            "compute_output", "Cumulative inference compute output duration in microseconds", "compute_output"
        ),
    ]
