"""What is counted of a model version's requests and executions: built, packed, and read back. Pure.

Counts travel with the script call that makes an answer final (`commit`, `work_finish`, or a script that refuses a
request). So an answered request counts exactly once, even if a process is killed or a call is repeated. `tally.lua`
says how counts are kept. A script itself counts the requests that it refuses, and the answers from the response cache.
There is one hash of sums per load of a model version and shard; gateways add up the shards.

Fields of the hash:
  success_count, success_ns, queue_ns, compute_input_ns, compute_infer_ns, compute_output_ns
                                        of the requests that succeeded
  inference_count                       sum of their batch sizes
  fail_count, fail_ns, fail_<reason>    of the requests that failed
  cache_hit_count, cache_hit_ns, cache_miss_count, cache_miss_ns
  last_inference_ms                     time of the last execution
  batch:<size>:count, batch:<size>:compute_input_ns, ..._infer_ns, ..._output_ns
                                        of the executions with this batch size
  sketch:<name>:<bucket>                for summaries, if they are wanted; buckets by index
  first_response:<bucket>               for the histogram; buckets by index
  held_batch_count, gained_row_count    batches that waited for sequences about to come back, and the rows that came
  response:<index>:<name>_ns, response:<index>:<kind>_count
                                        of the answers of decoupled models, by their place (`responses_of`)
  null_row_count                        rows of batches that no request filled
  full_log_count                        sequences that stopped being recoverable, because they had too many steps to
                                        keep
What follows from these numbers is not kept. Source: triton-spec 5.7 and 7.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import add

import msgspec

from shared.statistics.metrics_config import sketch_bucket

Counts = Mapping[str, int]
"""Field -> increment, or field -> sum."""

LAST_INFERENCE = "last_inference_ms"
"""The one field that is no sum: the latest time wins."""

DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
"""Durations with a count and nanoseconds, in the protocol's order."""

FULL_LOGS = "full_log_count"
HELD_BATCHES = "held_batch_count"
GAINED_ROWS = "gained_row_count"
NULL_ROWS = "null_row_count"
SKETCH = "sketch:"
FIRST_RESPONSE = "first_response:"
RESPONSE = "response:"
"""Beginnings of fields."""

COMPUTE = ("compute_input", "compute_infer", "compute_output")

SUCCESS = (
    "success_count",
    "success_ns",
    "queue_ns",
    "inference_count",
    "compute_input_ns",
    "compute_infer_ns",
    "compute_output_ns",
)
"""The fields of a request that succeeded, when nothing else is counted of it. It is packed as their numbers alone."""


class FailureReason(StrEnum):
    """Why a request failed (triton-spec 7).

    REJECTED  it waited too long, or the queue was full
    CANCELED  its caller has gone
    BACKEND   the model failed
    OTHER     anything else
    """

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class ModelLoad(msgspec.Struct, frozen=True):
    """One load of a model version: counts are kept for each load.

    generation  which load it is, the same on every executor (`ModelRecord.generation`)
    """

    model: str
    version: str
    generation: str


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of memory that a model's instances hold. type: CPU, CPU_PINNED or GPU (triton-spec 5.7); id: of the
    device
    """

    type: str
    id: int
    byte_size: int


class Response(msgspec.Struct, frozen=True):
    """One answer of a decoupled model. ns: since the answer before it, or since the request began to run

    is_empty  the last answer had nothing to give
    """

    ns: int
    failed: bool = False
    is_empty: bool = False


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of one execution went, ns: making tensors, the model itself, taking results apart."""

    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    def plus(self, other: Timings) -> Timings:
        return Timings(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def items(self) -> tuple[tuple[str, int], ...]:
        """The three times, by their names in `COMPUTE`."""
        return tuple(zip(COMPUTE, msgspec.structs.astuple(self), strict=True))


# -- counting ----------------------------------------------------------------------------------------------------


def success(*, rows: int, total_ns: int, queue_ns: int, compute: Timings) -> dict[str, int]:
    """Counts of one request that succeeded. rows: its own batch size. Each request of a batch counts the times of the
    batch.
    """
    return dict(zip(SUCCESS, _success(rows, total_ns, queue_ns, compute), strict=True))


def packed_success(*, rows: int, total_ns: int, queue_ns: int, compute: Timings) -> bytes:
    """`success`, packed. No number may be below 0."""
    return _pack(_success(rows, total_ns, queue_ns, compute))


def _success(rows: int, total_ns: int, queue_ns: int, compute: Timings) -> tuple[int, ...]:
    return 1, total_ns, queue_ns, rows, compute.compute_input_ns, compute.compute_infer_ns, compute.compute_output_ns


def failure(reason: FailureReason, *, total_ns: int) -> dict[str, int]:
    """Counts of one request that was accepted and got an error."""
    return {"fail_count": 1, "fail_ns": total_ns, f"fail_{reason}": 1}


def execution(*, batch_size: int, compute: Timings, ended_ms: int, null_rows: int = 0) -> dict[str, int]:
    """Counts of one run of the model.

    batch_size  rows, null rows included, as Triton's backends report it
    ended_ms    wall clock
    """
    counts = {f"batch:{batch_size}:count": 1, LAST_INFERENCE: ended_ms}
    if null_rows:
        counts[NULL_ROWS] = null_rows
    for name, ns in compute.items():
        counts[f"batch:{batch_size}:{name}_ns"] = ns
    return counts


def sketches(durations_ns: Mapping[str, int]) -> dict[str, int]:
    """Counts of one request's durations, for the summaries, by their names in the metric's name (triton-spec 7)."""
    return {f"{SKETCH}{name}:{sketch_bucket(ns // 1000)}": 1 for name, ns in durations_ns.items()}


def first_response(ns: int, bounds_ms: Sequence[float]) -> dict[str, int]:
    """Counts of one request's time to its first response, for the histogram.

    bounds_ms  upper ends of all buckets but the last
    """
    return {f"{FIRST_RESPONSE}{bisect_left(bounds_ms, ns / 1e6)}": 1, f"{FIRST_RESPONSE}ns": ns}


def response_counts(responses: Sequence[Response]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for index, response in enumerate(responses):
        kind = "fail" if response.failed else "empty_response" if response.is_empty else "success"
        counts[f"{RESPONSE}{index}:{kind}_count"] = 1
        counts[f"{RESPONSE}{index}:{kind}_ns"] = response.ns
    return counts


def added(several: Iterable[Counts]) -> dict[str, int]:
    total: Counter[str] = Counter()
    last = 0
    for counts in several:
        last = max(last, counts.get(LAST_INFERENCE, 0))
        total.update(counts)
    if last:
        total[LAST_INFERENCE] = last
    return dict(total)


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[str | int]).decode


def packed(counts: Counts) -> bytes:
    """Counts as the scripts take them: one argument. b"" counts nothing."""
    if not counts:
        return b""
    # Clocks of two hosts may differ, so a duration can come out below 0. Where one of them is not set yet, it is of
    # decades: a second's sum may be larger than any number of msgpack.
    if min(counts.values()) < 0 or max(counts.values()) > COUNT_MAX:
        counts = {name: min(COUNT_MAX, max(0, by)) for name, by in counts.items()}
    return _pack([*chain.from_iterable(counts.items())])


def unpacked(data: bytes) -> dict[str, int]:
    flat = _unpack(data) if data else []
    if len(flat) == len(SUCCESS):
        return dict(zip(SUCCESS, map(int, flat), strict=True))
    return {str(name): int(by) for name, by in zip(flat[::2], flat[1::2], strict=True)}


# -- reading -----------------------------------------------------------------------------------------------------

COUNT_MAX = (1 << 63) - 1
"""The largest sum that Redis keeps, and that is told of all shards together."""
_INDEXED = ("batch:", SKETCH, RESPONSE)
_INDEX = re.compile(r"(?:(?:batch|response):(?:0|[1-9][0-9]{0,8}):|sketch:[^:]+:(?:0|[1-9][0-9]{0,3})$)")


def count_of(field: str, data: bytes) -> int:
    """The value of a field of the hash. Raises ValueError for what nothing here has counted."""
    if field.startswith(_INDEXED) and not _INDEX.match(field):
        raise ValueError("the field's index is no number")
    if not 0 <= (count := int(data)) <= COUNT_MAX:
        raise ValueError(f"{data.decode()} is no count")
    return count


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something was measured, and the sum of its nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Statistics of one model version, summed over the mesh.

    last_inference  wall clock, ms since 1970
    durations       by the names in `DURATIONS`
    failures        failed requests by reason; every reason is there
    counts          the sums themselves
    memory_usage    of all its instances, by kind of memory and device
    responses       of a decoupled model: by the place of the answer, from "0"; the names are those of `response_stats`
    """

    name: str
    version: str
    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    durations: Mapping[str, Duration] = field(default_factory=dict[str, Duration])
    batches: Sequence[BatchStatistics] = ()
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    counts: Counts = field(default_factory=dict[str, int])
    memory_usage: Sequence[MemoryUse] = ()
    responses: Mapping[str, Mapping[str, Duration]] = field(default_factory=dict[str, Mapping[str, Duration]])

    @property
    def rows(self) -> int:
        """Rows of all batches, without those that no request filled."""
        rows = sum(batch.batch_size * batch.compute_infer.count for batch in self.batches)
        return rows - self.counts.get(NULL_ROWS, 0)


def statistics_of(model: str, version: str, counts: Counts, memory_usage: Sequence[MemoryUse] = ()) -> ModelStatistics:
    """The statistics that the sums contain; a missing field counts as 0."""
    sizes = sorted(int(name.split(":")[1]) for name in counts if name.startswith("batch:") and name.endswith(":count"))
    return ModelStatistics(
        name=model,
        version=version,
        last_inference=counts.get(LAST_INFERENCE, 0),
        inference_count=counts.get("inference_count", 0),
        execution_count=sum(counts[f"batch:{size}:count"] for size in sizes),
        durations={name: _duration(name, counts) for name in DURATIONS},
        batches=[_batch(size, counts) for size in sizes],
        failures={reason.value: counts.get(f"fail_{reason}", 0) for reason in FailureReason},
        counts=counts,
        memory_usage=memory_usage,
        responses=responses_of(counts),
    )


def responses_of(counts: Counts) -> dict[str, dict[str, Duration]]:
    """The answers of a decoupled model, by place. `compute_output` is part of `compute_infer`: the model makes the
    tensors.
    """
    places = {int(name.split(":")[1]) for name in counts if name.startswith(RESPONSE)}
    found: dict[str, dict[str, Duration]] = {}
    for place in sorted(places):
        ends = {
            kind: Duration(
                counts.get(f"{RESPONSE}{place}:{kind}_count", 0), counts.get(f"{RESPONSE}{place}:{kind}_ns", 0)
            )
            for kind in ("success", "fail", "empty_response")
        }
        full = (ends["success"], ends["fail"])
        computed = Duration(sum(one.count for one in full), sum(one.ns for one in full))
        output = Duration(computed.count, 0)
        found[str(place)] = {"compute_infer": computed, "compute_output": output, **ends, "cancel": Duration()}
    return found


def sketch_of(counts: Counts, name: str) -> dict[int, int]:
    """The buckets of one summary: index -> requests."""
    prefix = f"{SKETCH}{name}:"
    return {int(field.removeprefix(prefix)): count for field, count in counts.items() if field.startswith(prefix)}


def first_response_of(counts: Counts, buckets: int) -> tuple[list[int], float]:
    """The histogram: requests per bucket (not cumulative), and the sum of their times, ms."""
    return [counts.get(f"{FIRST_RESPONSE}{bucket}", 0) for bucket in range(buckets)], counts.get(
        f"{FIRST_RESPONSE}ns", 0
    ) / 1e6


def _duration(name: str, counts: Counts) -> Duration:
    """The times of one stage. A count that has no field follows from others.

    Every request that succeeded was queued, and it was computed unless the cache had its answer.
    """
    ns = counts.get(f"{name}_ns", 0)
    if name == "queue":
        return Duration(counts.get("success_count", 0), ns)
    if name in COMPUTE:
        return Duration(counts.get("success_count", 0) - counts.get("cache_hit_count", 0), ns)
    return Duration(counts.get(f"{name}_count", 0), ns)


def _batch(size: int, counts: Counts) -> BatchStatistics:
    executions = counts[f"batch:{size}:count"]
    times = (Duration(executions, counts.get(f"batch:{size}:{name}_ns", 0)) for name in COMPUTE)
    return BatchStatistics(size, *times)
