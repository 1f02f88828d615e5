"""Metrics that a `model.py` makes for itself, served with the executor's own.

A family has any labels its metrics bring (prometheus_client's own classes fix the label names per family, Triton does
not), so a small collector per family keeps the values. Two instances of a model that make the same family share it,
and two metrics with the same labels share their value, as in Triton. A counter is exported with the suffix `_total`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as ExportedMetric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]

COUNTER = "COUNTER"
GAUGE = "GAUGE"
HISTOGRAM = "HISTOGRAM"


_EXPORTED = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily, HISTOGRAM: HistogramMetricFamily}


class TritonModelException(Exception):
    """Raised by a model, or by the interface that a model uses."""


class _Value:
    """One metric's value; for a histogram also its buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.value = 0.0
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)


class _Family(Collector):
    """All metrics of one name."""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.lock = threading.Lock()
        self.values: dict[Labels, _Value] = {}

    def describe(self) -> Iterable[ExportedMetric]:
        return [_EXPORTED[self.kind](self.name, self.description)]

    def collect(self) -> Iterable[ExportedMetric]:
        with self.lock:
            exported = [self._exported(labels, value) for labels, value in self.values.items()]
        for other in exported[1:]:
            exported[0].samples.extend(other.samples)
        return exported[:1]

    def _exported(self, labels: Labels, value: _Value) -> ExportedMetric:
        names, contents = [name for name, _ in labels], [content for _, content in labels]
        if self.kind == COUNTER:
            counter = CounterMetricFamily(self.name, self.description, labels=names)
            counter.add_metric(contents, value.value)
            return counter
        if self.kind == GAUGE:
            gauge = GaugeMetricFamily(self.name, self.description, labels=names)
            gauge.add_metric(contents, value.value)
            return gauge
        histogram = HistogramMetricFamily(self.name, self.description, labels=names)
        histogram.add_metric(contents, _cumulative(value), value.value)
        return histogram


def _cumulative(value: _Value) -> list[tuple[str, float]]:
    bounds = [*map(str, value.bounds), "+Inf"]
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, value.buckets, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


_families: dict[str, _Family] = {}
_families_lock = threading.Lock()


def _family(name: str, description: str, kind: str) -> _Family:
    with _families_lock:
        family = _families.get(name)
        if family is None:
            family = _Family(name, description, kind)
            try:
                REGISTRY.register(family)
            except ValueError as error:
                raise TritonModelException(f"metric '{name}' cannot be registered: {error}") from error
            _families[name] = family
        if family.kind != kind:
            raise TritonModelException(f"metric family '{name}' already exists as {family.kind}, not {kind}")
        return family


class Metric:
    """One metric of a family, made by `MetricFamily.Metric`."""

    def __init__(self, family: _Family, labels: Labels, bounds: tuple[float, ...]) -> None:
        self._family = family
        with family.lock:
            self._value = family.values.setdefault(labels, _Value(bounds))

    def increment(self, value: float) -> None:
        """Adds to a counter (never less than 0) or a gauge."""
        if self._family.kind == HISTOGRAM or (self._family.kind == COUNTER and value < 0):
            raise TritonModelException(f"a {self._family.kind} cannot be incremented by {value}")
        with self._family.lock:
            self._value.value += value

    def set(self, value: float) -> None:
        """Sets a gauge."""
        if self._family.kind != GAUGE:
            raise TritonModelException(f"a {self._family.kind} cannot be set")
        with self._family.lock:
            self._value.value = value

    def observe(self, value: float) -> None:
        """Adds an observation to a histogram."""
        if self._family.kind != HISTOGRAM:
            raise TritonModelException(f"a {self._family.kind} has no observations")
        with self._family.lock:
            self._value.value += value
            self._value.buckets[bisect.bisect_left(self._value.bounds, value)] += 1

    def value(self) -> float:
        """The present value of a counter or gauge."""
        if self._family.kind == HISTOGRAM:
            raise TritonModelException("a HISTOGRAM has no single value")
        with self._family.lock:
            return self._value.value


class MetricFamily:
    """Metrics of one name and kind."""

    COUNTER = COUNTER
    GAUGE = GAUGE
    HISTOGRAM = HISTOGRAM

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._family = _family(name, description, kind)

    def Metric(  # noqa: N802  # the documented name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """One metric. buckets: upper bounds of a histogram, increasing."""
        if (self._family.kind == HISTOGRAM) != bool(buckets):
            raise TritonModelException("buckets are needed for a HISTOGRAM, and allowed for nothing else")
        bounds = tuple(buckets or ())
        if list(bounds) != sorted(set(bounds)):
            raise TritonModelException(f"buckets must increase: {list(bounds)}")
        return Metric(self._family, tuple(sorted((labels or {}).items())), bounds)
