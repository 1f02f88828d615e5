"""Counters of model versions, which executors add up in Redis (`keyspace.stats`), as the protocols report them.

Fields of the hash: `success_count`, `success_ns`, the same with `fail`, `queue`, `compute_input`, `compute_infer` and
`compute_output`; `fail_<reason>` in Triton's words for the reason; `inference_count`, `execution_count`,
`last_inference_ms`; and per batch size `batch:<size>:count`, `batch:<size>:compute_input_ns`, `..._infer_ns`,
`..._output_ns`. Source: triton-spec 5.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from gateway.catalog import Catalog
from shared.errors import RequestError, UnavailableError
from shared.keyspace import Keyspace
from shared.redis_client import CONNECTION_LOST

DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
"""In the protocol's order; the mesh has no response cache, so the last two stay 0."""

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Why requests fail (triton-spec 7)."""


@dataclass(frozen=True, slots=True)
class Duration:
    """How often, and nanoseconds together."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """One model version, summed over every executor.

    last_inference  wall clock, ms since 1970
    durations       by the names in `DURATIONS`
    failures        failed requests by the reasons in `FAILURE_REASONS`
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    durations: Mapping[str, Duration] = field(default_factory=dict[str, Duration])
    batches: Sequence[BatchStatistics] = ()
    failures: Mapping[str, int] = field(default_factory=dict[str, int])


class Statistics:
    """Reads the counters."""

    def __init__(self, redis: Redis, keys: Keyspace, catalog: Catalog) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast("Any", redis)
        self._keys = keys
        self._catalog = catalog

    async def read(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Statistics of the READY versions: of one model, of one version of it, or of all.

        Raises RequestError for a model or version that is not READY, UnavailableError without Redis.
        """
        wanted = self._versions(model, version)
        if not wanted:
            return []
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for name, number in wanted:
                    pipe.hgetall(self._keys.stats(name, number))
                counters: list[dict[bytes, bytes]] = await pipe.execute()
        except CONNECTION_LOST as lost:
            raise UnavailableError(f"Redis, which holds the statistics, cannot be reached: {lost}") from lost
        return [
            statistics_of(name, number, {key.decode(): int(value) for key, value in fields.items()})
            for (name, number), fields in zip(wanted, counters, strict=True)
        ]

    def _versions(self, model: str, version: str) -> list[tuple[str, str]]:
        ready = self._catalog.picture.ready
        if not model:
            return [(name, number) for name in sorted(ready) for number in ready[name]]
        if model not in ready:
            raise RequestError(f"requested model '{model}' is not available")
        if version and version not in ready[model]:
            raise RequestError(f"requested model version is not available for model '{model}'")
        return [(model, number) for number in ready[model] if not version or number == version]


def statistics_of(model: str, version: str, counters: Mapping[str, int]) -> ModelStatistics:
    """The statistics in a hash of counters; what is missing counts as 0."""

    def duration(name: str) -> Duration:
        return Duration(counters.get(f"{name}_count", 0), counters.get(f"{name}_ns", 0))

    sizes = sorted(int(key.split(":")[1]) for key in counters if key.startswith("batch:") and key.endswith(":count"))
    return ModelStatistics(
        name=model,
        version=version,
        last_inference=counters.get("last_inference_ms", 0),
        inference_count=counters.get("inference_count", 0),
        execution_count=counters.get("execution_count", 0),
        durations={name: duration(name) for name in DURATIONS},
        batches=[_batch(size, counters) for size in sizes],
        failures={reason: counters.get(f"fail_{reason}", 0) for reason in FAILURE_REASONS},
    )


def _batch(size: int, counters: Mapping[str, int]) -> BatchStatistics:
    count = counters[f"batch:{size}:count"]

    def duration(name: str) -> Duration:
        return Duration(count, counters.get(f"batch:{size}:{name}_ns", 0))

    return BatchStatistics(size, duration("compute_input"), duration("compute_infer"), duration("compute_output"))
