"""How a page of metrics is written: Prometheus' text format, and OpenMetrics for those who ask for it. Pure.

prometheus_client insists on the suffix `_total` for counters, which Triton's names do not have. So this module writes
both formats itself (docs/decisions/0029). OpenMetrics insists on it, too: there, a counter without the suffix has the
type `unknown`, and its name. Only OpenMetrics has exemplars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client.utils

from shared.statistics.reports import Sample

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_untyped: Any = prometheus_client.utils
_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class ShownExemplar:
    """An exemplar as it is written. value: in the unit of its family; at_s: seconds since 1970"""

    trace_id: str
    span_id: str
    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. exemplars: by the index of their sample, which is a bucket of a histogram"""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]
    exemplars: Mapping[int, ShownExemplar] = field(default_factory=dict[int, ShownExemplar])

    def lines(self) -> Iterable[str]:
        """Prometheus' text format; labels by name, as Triton writes them."""
        yield f"# HELP {self.name} {escaped(self.help, quotes=False)}"
        yield f"# TYPE {self.name} {self.kind}"
        for sample in self.samples:
            yield f"{self.name}{sample.suffix}{_labels(sample.labels)} {number(sample.value)}"

    def openmetrics_lines(self) -> Iterable[str]:
        """The same in OpenMetrics, with exemplars."""
        name, kind = self.name, self.kind
        if kind == "counter":
            name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
        yield f"# TYPE {name} {kind}"
        yield f"# HELP {name} {escaped(self.help)}"
        for index, sample in enumerate(self.samples):
            labels = sample.labels
            if self.kind == "histogram" and "le" in labels:
                labels = {**labels, "le": bound_text(float(labels["le"]))}
            line = f"{self.name}{sample.suffix}{_labels(labels)} {number(sample.value)}"
            found = self.exemplars.get(index)
            yield line if found is None else f"{line} # {_exemplar(found)}"


def number_family(name: str, text: str, samples: Sequence[Sample] = ()) -> Family:
    """A metric with one of the mesh's own names, which say what counts up."""
    return Family(name, "counter" if name.endswith("_total") else "gauge", text, samples)


def wants_openmetrics(accept: str) -> bool:
    """Whether a client asks for OpenMetrics by its header `Accept`, as Prometheus does, and not less than for text."""
    weights: dict[str, float] = {}
    for name, weight in map(_weighed, accept.split(",")):
        weights[name] = max(weight, weights.get(name, 0.0))
    return weights.get(_OPENMETRICS, 0.0) > 0 and weights[_OPENMETRICS] >= weights.get("text/plain", 0.0)


def _weighed(part: str) -> tuple[str, float]:
    """A media range and its weight. One with a version other than 1.x or 0.0.1 has none."""
    name, *parameters = (word.strip().lower() for word in part.split(";"))
    values = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
    version = values.get("version", "1.0.0").strip()
    if name == _OPENMETRICS and not (version.startswith("1.") or version == "0.0.1"):
        return f"{name};version={version}", 0.0
    try:
        return name, float(values.get("q", "1"))
    except ValueError:
        return name, 0.0


def bound_text(bound: float) -> str:
    """The upper end of a bucket as OpenMetrics wants it in the label `le`, with a point: 1.0."""
    text: str = _untyped.floatToGoString(bound)
    return text


def escaped(text: str, *, quotes: bool = True) -> str:
    """Escapes a label's value, or with `quotes=False` a help text."""
    plain = text.replace("\\", "\\\\").replace("\n", "\\n")
    return plain.replace('"', '\\"') if quotes else plain


def number(value: float) -> str:
    """A value as Prometheus reads it."""
    return "NaN" if math.isnan(value) else repr(value)


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{escaped(text)}"' for name, text in sorted(labels.items()))
    return f"{{{inside}}}" if inside else ""


def _exemplar(found: ShownExemplar) -> str:
    labels = _labels({"trace_id": found.trace_id, "span_id": found.span_id})
    return f"{labels} {number(found.value)} {found.at_s:.3f}"
