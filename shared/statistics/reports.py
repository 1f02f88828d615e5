"""What an executor reports of itself while it lives, about once a second: gauges, which are not worth a stream.

Counts are not in a report: they would be lost with a killed executor (`shared.statistics.tally`). Where a report lies,
and for how long: `shared.store.reporting`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.statistics.meter import Exemplar
from shared.statistics.tally import MemoryUse

Labels = dict[str, str]


class ModelReport(msgspec.Struct, frozen=True, array_like=True):
    """One version of a model on one executor.

    pending       requests that have arrived here and do not run yet
    load_seconds  what its loading took; 0 when it was not measured
    batches       rows of the batches that have run here since the report before, the latest of them last
    exemplars     of what was measured of the version here
    """

    model: str
    version: str
    pending: int = 0
    load_seconds: float = 0.0
    memory: tuple[MemoryUse, ...] = ()
    batches: tuple[int, ...] = ()
    exemplars: tuple[Exemplar, ...] = ()


class HostReport(msgspec.Struct, frozen=True, array_like=True):
    """The machine. cpu_utilization: 0 to 1, since the report before; memory in bytes."""

    cpu_utilization: float
    memory_total: int
    memory_used: int


class GpuReport(msgspec.Struct, frozen=True, array_like=True):
    """One GPU. utilization: 0 to 1; memory in bytes; power in watts; energy in joules since the driver was loaded.

    A value that the device does not tell is None.
    """

    uuid: str
    utilization: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    power_usage: float | None = None
    power_limit: float | None = None
    energy: float | None = None


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of a metric page. suffix: "", or of a histogram `_bucket`, `_sum`, `_count`."""

    suffix: str
    labels: Labels
    value: float


class CustomFamily(msgspec.Struct, frozen=True, array_like=True):
    """A metric that a model makes for itself. kind: counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


class ExecutorReport(msgspec.Struct, frozen=True, array_like=True):
    """A whole report. host: the machine's name, the same for all executors on it"""

    executor: str
    host: str
    machine: HostReport
    models: tuple[ModelReport, ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    families: tuple[CustomFamily, ...] = ()


encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(ExecutorReport).decode


def merged_families(reports: Iterable[Iterable[CustomFamily]]) -> list[CustomFamily]:
    """The metrics of models of several processes: samples of the same name and labels are added."""
    families: dict[str, CustomFamily] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for report in reports:
        for family in report:
            families.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                line = (sample.suffix, tuple(sample.labels.items()))
                values[line] = values.get(line, 0.0) + sample.value
    return [
        CustomFamily(
            name,
            families[name].kind,
            families[name].help,
            tuple(Sample(suffix, dict(labels), value) for (suffix, labels), value in sums[name].items()),
        )
        for name in sorted(families)
    ]
