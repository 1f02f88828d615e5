"""What an executor tells of itself while it lives, about once a second: gauges, which are not worth a stream.

Counts do not travel here: a killed executor would take them with it (`shared.tally`). A report is a string with a short
TTL; gateways read those of living executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from shared.ids import ExecutorId
from shared.keyspace import Keyspace
from shared.tally import MemoryUse

REPORT_TTL_MS = 10_000
"""Ten reports may be missed; then the executor's numbers are not shown any more."""

Labels = dict[str, str]


class ModelReport(msgspec.Struct, frozen=True, array_like=True):
    """One version of a model on one executor.

    pending       requests that have arrived here and do not run yet
    load_seconds  what its loading took; 0 when it was not measured
    """

    model: str
    version: str
    pending: int = 0
    load_seconds: float = 0.0
    memory: tuple[MemoryUse, ...] = ()


class HostReport(msgspec.Struct, frozen=True, array_like=True):
    """The machine. cpu_utilization: 0 to 1, since the report before; memory in bytes."""

    cpu_utilization: float
    memory_total: int
    memory_used: int


class GpuReport(msgspec.Struct, frozen=True, array_like=True):
    """One GPU. utilization: 0 to 1; memory in bytes; power in watts; energy in joules since the driver was loaded.

    What the device does not tell is None.
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
    """All of it. host: the machine's name, the same for all executors on it."""

    executor: str
    host: str
    machine: HostReport
    models: tuple[ModelReport, ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    families: tuple[CustomFamily, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ExecutorReport).decode


class Reports:
    """Writes and reads reports."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast(Any, redis)
        self._keys = keys

    async def write(self, report: ExecutorReport) -> None:
        """Replaces an executor's report."""
        await self._redis.set(self._keys.report(ExecutorId(report.executor)), _encode(report), px=REPORT_TTL_MS)

    async def read(self, executors: Iterable[ExecutorId]) -> list[ExecutorReport]:
        """The reports of these executors, as far as there are any."""
        names = [self._keys.report(executor) for executor in executors]
        if not names:
            return []
        return [_decode(data) for data in await self._redis.mget(names) if data is not None]


def merged_families(reports: Sequence[ExecutorReport]) -> list[CustomFamily]:
    """The metrics of models on all executors: samples of the same name and labels are added."""
    families: dict[str, CustomFamily] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for report in reports:
        for family in report.families:
            families.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                place = (sample.suffix, tuple(sample.labels.items()))
                values[place] = values.get(place, 0.0) + sample.value
    return [
        CustomFamily(
            name,
            families[name].kind,
            families[name].help,
            tuple(Sample(suffix, dict(labels), value) for (suffix, labels), value in sums[name].items()),
        )
        for name in sorted(families)
    ]
