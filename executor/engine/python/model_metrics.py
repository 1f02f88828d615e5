"""Metrics that a `model.py` makes for itself. The executor reports them, and gateways show them with the mesh's.

The metrics of a family may have any labels (prometheus_client's own classes fix the label names per family; Triton does
not). Two instances of a model that make the same family share it, and two metrics with the same labels share their
value, as in Triton. A family goes with the last instance that made it.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate

from executor.engine.python.instance_code import InstanceCode, current_code
from executor.engine.python.texts import plain_text
from shared.statistics.reports import CustomFamily, Sample, merged_families

Labels = tuple[tuple[str, str], ...]

COUNTER = "COUNTER"
GAUGE = "GAUGE"
HISTOGRAM = "HISTOGRAM"
METRICS_MAX = 10_000
"""Metrics of all families in a process; a family without any counts as one. Every second the event loop reports them,
so many in 15 ms.
"""
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
"""What Prometheus reads. Source: its documentation, "Data model"."""


class TritonModelException(Exception):
    """Raised by a model, or by the interface that a model uses."""


class _Value:
    """One metric's value; for a histogram also its buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.value = 0.0
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)


class _Family:
    """makers: the instances that made it; None: a thread of a model's own did, so that it stays"""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.makers: set[InstanceCode | None] = set()
        self.name = name
        self.description = description
        self.kind = kind
        # Re-entrant, as that of all families: the collector of garbage may have a model count on a thread that has it.
        self.lock = threading.RLock()
        self.values: dict[Labels, _Value] = {}

    def report(self) -> CustomFamily:
        """The family as gateways show it: under its own name, as Triton does, without a suffix for a counter."""
        with self.lock:
            samples = [sample for labels, value in self.values.items() for sample in _samples(self.kind, labels, value)]
        return CustomFamily(self.name, self.kind.lower(), self.description, tuple(samples))


def _samples(kind: str, labels: Labels, value: _Value) -> list[Sample]:
    if kind != HISTOGRAM:
        return [Sample("", dict(labels), value.value)]
    bounds, counts = [*map(str, value.bounds), "+Inf"], list(accumulate(value.buckets))
    return [
        *(
            Sample("_bucket", {**dict(labels), "le": bound}, float(count))
            for bound, count in zip(bounds, counts, strict=True)
        ),
        Sample("_sum", dict(labels), value.value),
        Sample("_count", dict(labels), float(counts[-1])),
    ]


_families: dict[str, _Family] = {}
_families_lock = threading.RLock()


_reported: dict[object, tuple[CustomFamily, ...]] = {}
"""What processes of instances have reported last."""


def custom_families() -> tuple[CustomFamily, ...]:
    """The families of every model of this process and of its instances' processes, for the executor's report."""
    with _families_lock:
        families = list(_families.values())
        reported = list(_reported.values())
    own = tuple(family.report() for family in families)
    return tuple(merged_families([own, *reported])) if reported else own


def report_families(process: object, families: tuple[CustomFamily, ...]) -> None:
    """All families of an instance's process, as they are now."""
    with _families_lock:
        _reported[process] = families


def forget_reported(process: object) -> None:
    """Drops the families of a process that has ended: their samples go from the page."""
    with _families_lock:
        _reported.pop(process, None)


def forget_families(code: InstanceCode) -> None:
    """An instance of this process is gone, and with it the families that no other one made."""
    with _families_lock:
        for name, family in list(_families.items()):
            family.makers.discard(code)
            if not family.makers:
                del _families[name]


def _family(name: str, description: str, kind: str) -> _Family:
    code = current_code.get(None)
    with _families_lock:
        family = _families.get(name)
        if family is None:
            _check_room()
        if family is None or (family.kind != kind and _is_of_predecessors(family, code)):
            family = _families[name] = _Family(name, description, kind)
        if family.kind != kind:
            raise TritonModelException(f"metric family '{name}' already exists as {family.kind}, not {kind}")
        family.makers.add(code)
        return family


def _is_of_predecessors(family: _Family, code: InstanceCode | None) -> bool:
    """Whether all that made a family are other instances of the same model, which a load is about to replace."""
    return code is not None and all(
        one is not None and one is not code and one.model == code.model for one in family.makers
    )


def _text(given: object) -> str:
    """A model may give anything. A value that is no text would make the executor's whole report fail."""
    if not isinstance(given, str):
        raise TypeError(f"names, descriptions and labels of metrics are strings, not {given!r}")
    given.encode()
    return plain_text(given)


def _check_label(label: str, kind: str) -> None:
    if LABEL.fullmatch(label) is None or (label == "le" and kind == HISTOGRAM):
        raise TritonModelException(
            f"'{label}' is no label of a metric: letters, digits and '_', no digit first, and not 'le' of a HISTOGRAM"
        )


def _bounds(buckets: Sequence[float] | None) -> tuple[float, ...]:
    try:
        bounds = tuple(bound if type(bound) is int else float(bound) for bound in buckets or ())
    except (TypeError, ValueError) as error:
        raise TritonModelException(f"buckets are numbers: {error}") from error
    if list(bounds) != sorted(set(bounds)) or any(map(math.isnan, bounds)):
        raise TritonModelException(f"buckets must increase: {list(bounds)}")
    return bounds


def _check_room() -> None:
    """Raises TritonModelException if the process has no room for another metric."""
    if sum(max(1, len(family.values)) for family in list(_families.values())) >= METRICS_MAX:
        raise TritonModelException(
            f"a process has no more than {METRICS_MAX} metrics: a label is for few values, not for each request's own"
        )


class Metric:
    """One metric of a family, made by `MetricFamily.Metric`."""

    def __init__(self, family: _Family, labels: Labels, bounds: tuple[float, ...]) -> None:
        self._family = family
        with family.lock:
            if family.values and labels not in family.values:
                _check_room()
            self._value = family.values.setdefault(labels, _Value(bounds))

    def increment(self, value: float) -> None:
        """Adds to a counter (never less than 0) or a gauge. Any number is taken, also numpy's, here and below."""
        value = float(value)
        if self._family.kind == HISTOGRAM or (self._family.kind == COUNTER and value < 0):
            raise TritonModelException(f"a {self._family.kind} cannot be incremented by {value}")
        with self._family.lock:
            self._value.value += value

    def set(self, value: float) -> None:
        if self._family.kind != GAUGE:
            raise TritonModelException(f"a {self._family.kind} cannot be set")
        value = float(value)
        with self._family.lock:
            self._value.value = value

    def observe(self, value: float) -> None:
        if self._family.kind != HISTOGRAM:
            raise TritonModelException(f"a {self._family.kind} has no observations")
        value = float(value)
        with self._family.lock:
            self._value.value += value
            self._value.buckets[bisect.bisect_left(self._value.bounds, value)] += 1

    def value(self) -> float:
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
        name, description, kind = _text(name), _text(description), _text(kind)
        # A name that Prometheus cannot read would spoil the page of the whole mesh.
        if NAME.fullmatch(name) is None:
            raise TritonModelException(f"'{name}' is no name of a metric: letters, digits, '_' and ':', no digit first")
        if kind not in (COUNTER, GAUGE, HISTOGRAM):
            raise TritonModelException(f"a metric family is a COUNTER, a GAUGE or a HISTOGRAM, not '{kind}'")
        self._family = _family(name, description, kind)

    def Metric(  # noqa: N802  # the documented name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """One metric. buckets: upper bounds of a histogram, increasing."""
        if (self._family.kind == HISTOGRAM) != bool(buckets):
            raise TritonModelException("buckets are needed for a HISTOGRAM, and allowed for nothing else")
        bounds = _bounds(buckets)
        pairs = sorted((_text(name), _text(value)) for name, value in (labels or {}).items())
        for name, _ in pairs:
            _check_label(name, self._family.kind)
        return Metric(self._family, tuple(pairs), bounds)
