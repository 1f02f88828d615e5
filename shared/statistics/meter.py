"""What a process measures of a model's load: distributions with exemplars, and counts. Pure.

Counts that must be exact travel with the script call that makes an answer final (`shared.statistics.tally`). A
distribution has too many fields for that. So a process adds its measurements up in memory, and hands the sums to the
same tallies about once a second (`shared.store.metering`). A process that is killed takes its last second along, and
nothing else: the sums in Redis never fall while the load lives.

Fields that a meter adds to the hash of counts:
  <name>:<bucket>     measured values by bucket, by index; <name>:sum  their sum, in nanoseconds, bytes or rows
  <name>              a count
`PHASES` and the other names below say which there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from shared.statistics.tally import Counts, ModelLoad

SECOND = 1_000_000_000
TIME_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the buckets of durations; longer ones share the last bucket."""
TIME_BOUNDS_NS = tuple(round(bound * SECOND) for bound in TIME_BOUNDS_S)
SLOT_WAIT_BOUNDS_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets of waits for a slot, which may last while other sequences live."""
ROW_BOUNDS = tuple(2**power for power in range(11))
"""Upper ends of the buckets of batch sizes, 1 to 1024 rows."""


class Phase(StrEnum):
    """The phases of a request, as the spans of its trace are called (`shared.traces.tracing`).

    GATEWAY     from its arrival until Redis has accepted it; a gateway measures it
    SCHEDULE    until it is in its owner's inbox: a step waits here for a slot, or for a takeover
    QUEUE       until its batch begins
    COMPUTE     its batch, in the model
    CHECKPOINT  the commit: state, step number and reply into Redis
    REPLY       from the reply's return to the gateway until its caller has it
    """

    GATEWAY = "gateway"
    SCHEDULE = "schedule"
    QUEUE = "queue"
    COMPUTE = "compute"
    CHECKPOINT = "checkpoint"
    REPLY = "reply"


REQUEST_TIME = "request_time"
"""From a request's arrival at its gateway until its caller has the answer; requests that succeeded."""
BATCH_ROWS = "batch_rows"
CHECKPOINTS = "checkpoint_count"
CHECKPOINT_BYTES = "checkpoint_bytes"
REPLAYED_STEPS = "replayed_step_count"
STEP_OUTCOME = "step_outcome_"
"""Begins the name of a count of steps, which ends with how they went (`shared.store.script_values.StepOutcome`)."""
REPEATED_STEPS = "repeated_step_count_"
"""Begins the name of a count of retries, which ends with how they were answered."""
OVER_QUOTA = "over_quota/"
"""Begins the name of a count of refused requests, which ends with their tenant; it belongs to no model."""
SLOT_WAIT = "slot_wait_"
"""Begins the name of a distribution, which ends with one of `SLOT_WAITS`; `assign.lua` measures it, in ms."""
SLOT_WAITS = ("start", "takeover", "page")
"""What a sequence waits as: it began; its owner was lost, left or gave it up; it had lent its slot to another one."""
ROUND_TRIP = "round_trip/"
"""Begins the name of a distribution of `OF_MESH`, which goes on with the service, a slash and the script's name."""

OF_MESH = ModelLoad("", "", "")
"""Under which is counted what belongs to no model."""


def phase_field(phase: Phase) -> str:
    """The name of a phase's distribution."""
    return f"phase_{phase}"


class Exemplar(msgspec.Struct, frozen=True, array_like=True):
    """One measured value of a bucket, with the trace that it belongs to.

    name    of the distribution
    trace   traceparent of the request's span
    value   in the distribution's own unit
    at_ms   when it was measured, wall clock
    """

    name: str
    bucket: int
    trace: str
    value: int
    at_ms: int


class Distribution:
    """Values of one kind, by bucket. bounds: upper ends of all buckets but the last, in the values' unit"""

    __slots__ = ("_bounds", "_counts", "_latest", "_name", "_sum")

    def __init__(self, name: str, bounds: Sequence[int]) -> None:
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        self._latest: dict[int, Exemplar] = {}

    def add(self, value: int, times: int = 1) -> None:
        """Measured a value, so many times. One below 0 (clocks of two hosts differ) counts as 0."""
        if value < 0:  # noqa: PLR1730 - a call of max takes as long as the rest of this method
            value = 0
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def show(self, value: int, trace: str, at_ns: int) -> None:
        """Makes a value that was added the exemplar of its bucket. at_ns: wall clock"""
        bucket = bisect_left(self._bounds, value)
        self._latest[bucket] = Exemplar(self._name, bucket, trace, max(0, value), at_ns // 1_000_000)

    def take(self) -> dict[str, int]:
        """What was added since the last call, by field."""
        taken = {f"{self._name}:{bucket}": count for bucket, count in enumerate(self._counts) if count}
        if taken:
            taken[f"{self._name}:sum"] = self._sum
            self._counts, self._sum = [0] * len(self._counts), 0
        return taken

    @property
    def exemplars(self) -> Iterable[Exemplar]:
        """The latest of each bucket that has any."""
        return self._latest.values()


class LoadMeter:
    """What one process measures of one load.

    counts  by name, since they were taken
    """

    def __init__(self) -> None:
        self._distributions: dict[str, Distribution] = {}
        self.counts: Counter[str] = Counter()

    def distribution(self, name: str, bounds: Sequence[int] = TIME_BOUNDS_NS) -> Distribution:
        """The distribution of this name, made when it is asked for the first time."""
        found = self._distributions.get(name)
        if found is None:
            found = self._distributions[name] = Distribution(name, bounds)
        return found

    def phase(self, phase: Phase) -> Distribution:
        return self.distribution(phase_field(phase))

    def take(self) -> dict[str, int]:
        """Everything since the last call, by field; it is not kept here."""
        taken, self.counts = self.counts, Counter()
        # Adds: what was given back may be of the same fields.
        for each in self._distributions.values():
            taken.update(each.take())
        return dict(taken)

    def give_back(self, counts: Counts) -> None:
        """Takes back what could not be handed on."""
        self.counts.update(counts)

    @property
    def exemplars(self) -> list[Exemplar]:
        """The latest of each bucket that has any."""
        return [exemplar for each in self._distributions.values() for exemplar in each.exemplars]


class RoundTripMeter:
    """Measures the round trips of one service to Redis. meter: of `OF_MESH`"""

    def __init__(self, service: str) -> None:
        self.meter = LoadMeter()
        self._service = service
        self._scripts: dict[str, Distribution] = {}

    def took(self, script: str, ns: int) -> None:
        """A round trip is over. script: the first that it called"""
        found = self._scripts.get(script)
        if found is None:
            name = f"{ROUND_TRIP}{self._service}/{script}"
            found = self._scripts[script] = self.meter.distribution(name)
        found.add(ns)


class Histogram(msgspec.Struct, frozen=True):
    """A distribution as it is read. buckets: values per bucket, not cumulative; total: sum of the values"""

    buckets: Sequence[int]
    total: int


def histogram_of(counts: Counts, name: str, bounds: Sequence[float]) -> Histogram:
    """The distribution of this name among the sums; with zeros where nothing was measured."""
    return Histogram(
        [counts.get(f"{name}:{bucket}", 0) for bucket in range(len(bounds) + 1)], counts.get(f"{name}:sum", 0)
    )


def names_of(counts: Counts, prefix: str) -> list[str]:
    """The distributions among the sums whose names begin so, in their order."""
    return sorted({name.partition(":")[0] for name in counts if name.startswith(prefix)})
