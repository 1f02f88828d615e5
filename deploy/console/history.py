"""What charts show: the mesh, and each version of a model, over the last minutes and the last hour. Pure.

A moment holds sums and counts by bucket, and no means or percentiles: those of a longer time do not follow from those
of shorter ones. So two moments are one longer moment, and a chart of an hour is made of the readings of a second.
Nothing is read while nobody looks: of that time there are no moments.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec

from deploy.console.events import more
from deploy.console.snapshot import Snapshot
from shared.statistics.meter import REQUEST_TIME, TIME_BOUNDS_S, Phase, phase_field
from shared.statistics.tally import ModelLoad, ModelStatistics, statistics_of

RANGES = {"5m": 1_000, "1h": 12_000}
"""The ranges that a chart may have, and how many ms one point of each stands for."""
POINTS_KEPT = 300
"""Points of one chart."""
MODELS_MAX = 32
"""Versions of models whose moments are kept, beside those of the whole mesh: about 0.7 MB each at most."""
GAP_MS = 10_000
"""Two readings further apart say nothing of the rates between them."""
NO_NUMBER = -1.0
"""In the place of a mean over nothing."""
PERCENTILES = (0.5, 0.95, 0.99)
BOUNDS_MS = (0.0, *(1000 * bound for bound in TIME_BOUNDS_S))
"""Where the buckets of times begin."""
TIMES = {"request": REQUEST_TIME, **{phase.value: phase_field(phase) for phase in Phase}}
"""What is measured of a request: its name in a chart -> the distribution's name."""

BUCKET_MAX = (1 << 32) - 1


class Subject(msgspec.Struct, frozen=True):
    """What a chart is of: a version of a model, or the whole mesh."""

    model: str = ""
    version: str = ""


MESH = Subject()


class ChartPoint(msgspec.Struct, frozen=True):
    """One point of every chart. Means in ms, -1 over nothing.

    batch  rows of a batch, on average; fill: which part of the largest batches that is, 0 to 1, -1 over nothing
    times  by the names in `TIMES`: the percentiles of `PERCENTILES` in ms; absent where nothing was measured
    """

    at_ms: int
    steps_per_s: float = 0.0
    failed_per_s: float = 0.0
    request_ms: float = NO_NUMBER
    batch: float = NO_NUMBER
    fill: float = NO_NUMBER
    live: int = 0
    waiting: int = 0
    times: Mapping[str, tuple[float, ...]] = {}


@dataclass(frozen=True, slots=True)
class Moment:
    """What was counted in a time that ended at `at_ms` and took `span_ms`.

    steps, request_ns  requests that succeeded, and the sum of their times
    batches, rows      that ran, without rows that no request filled; places: rows that they had room for
    live, waiting      sequences, at the end
    times              requests by bucket of their time, by the names in `TIMES`
    """

    at_ms: int
    span_ms: int = 0
    steps: int = 0
    failed: int = 0
    request_ns: int = 0
    batches: int = 0
    rows: int = 0
    places: int = 0
    live: int = 0
    waiting: int = 0
    times: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    @property
    def point(self) -> ChartPoint:
        return ChartPoint(
            at_ms=self.at_ms,
            steps_per_s=_ratio(1000 * self.steps, self.span_ms, 0.0),
            failed_per_s=_ratio(1000 * self.failed, self.span_ms, 0.0),
            request_ms=_ratio(self.request_ns / 1e6, self.steps),
            batch=_ratio(self.rows, self.batches),
            fill=_ratio(self.rows, self.places),
            live=self.live,
            waiting=self.waiting,
            times={name: percentiles_ms(buckets) for name, buckets in self.times.items()},
        )

    def then(self, later: Moment) -> Moment:
        """This one and the next as one moment."""
        summed = {
            name: getattr(self, name) + getattr(later, name)
            for name in ("span_ms", "steps", "failed", "request_ns", "batches", "rows", "places")
        }
        return replace(later, **summed, times=_added(self.times, later.times))


Moments = Mapping[Subject, Moment]


def moments_between(before: Snapshot | None, now: Snapshot, since: Mapping[ModelLoad, ModelStatistics]) -> Moments:
    """What was counted between two readings: of the mesh, and of each model. since: see `grown`"""
    span_ms = _span_ms(before, now)
    of_models = {
        Subject(load.model, load.version): _moment(now, load.model, span_ms, [each]) for load, each in since.items()
    }
    live, waiting = sum(now.live.values()), sum(line.first for line in now.lines.values())
    whole = replace(_moment(now, "", span_ms, list(since.values())), live=live, waiting=waiting)
    return {MESH: whole, **of_models}


def grown(before: Snapshot | None, now: Snapshot) -> dict[ModelLoad, ModelStatistics]:
    """The counts since the reading before; nothing for a load that is new, or after a gap."""
    if before is None or not _span_ms(before, now):
        return {}
    return {
        load: statistics_of(load.model, load.version, more(before.counts[load], counts))
        for load, counts in now.counts.items()
        if load in before.counts
    }


def _span_ms(before: Snapshot | None, now: Snapshot) -> int:
    """The time between two readings, ms; 0 if it says nothing of rates."""
    span_ms = now.at_ms - before.at_ms if before is not None else 0
    return span_ms if 0 < span_ms <= GAP_MS else 0


def _moment(now: Snapshot, model: str, span_ms: int, since: Sequence[ModelStatistics]) -> Moment:
    line = now.lines.get(model)
    times: Mapping[str, Sequence[int]] = {}
    for each in since:
        times = _added(times, _times(each))
    return Moment(
        at_ms=now.at_ms,
        span_ms=span_ms,
        steps=sum(each.durations["success"].count for each in since),
        failed=sum(sum(each.failures.values()) for each in since),
        request_ns=sum(each.durations["success"].ns for each in since),
        batches=sum(each.execution_count for each in since),
        rows=sum(each.rows for each in since),
        places=sum(each.execution_count * _rows_max(now, each.name) for each in since),
        live=now.live.get(model, 0),
        waiting=line.first if line is not None else 0,
        times=times,
    )


def _rows_max(now: Snapshot, model: str) -> int:
    return max(1, now.records[model].config.max_batch_size) if model in now.records else 1


def _times(statistics: ModelStatistics) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    for name, field_ in TIMES.items():
        buckets = _buckets(statistics.counts.get(f"{field_}:{bucket}", 0) for bucket in range(len(BOUNDS_MS)))
        if any(buckets):
            found[name] = buckets
    return found


def _added(one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    nothing = (0,) * len(BOUNDS_MS)
    return {
        name: _buckets(map(sum, zip(one.get(name, nothing), other.get(name, nothing), strict=True)))
        for name in TIMES
        if name in one or name in other
    }


def _buckets(counts: Iterable[int]) -> Sequence[int]:
    """In half the room of a list. A count beyond what they hold, which no mesh reaches in an hour, is their largest."""
    return array("I", [min(count, BUCKET_MAX) for count in counts])


def percentiles_ms(buckets: Sequence[int]) -> tuple[float, ...]:
    """`PERCENTILES` of times that were counted by bucket; within a bucket they are taken as spread evenly.

    Of times beyond the last bound it is only known that they are: they count as that bound, 10 s.
    """
    upto = list(accumulate(buckets))

    def at(share: float) -> float:
        wanted = share * upto[-1]
        bucket = next(index for index, count in enumerate(upto) if count >= wanted and count)
        low, high = BOUNDS_MS[bucket], BOUNDS_MS[min(bucket + 1, len(BOUNDS_MS) - 1)]
        return round(low + (high - low) * (wanted - (upto[bucket] - buckets[bucket])) / buckets[bucket], 3)

    return tuple(at(share) for share in PERCENTILES)


def _ratio(part: float, whole: float, nothing: float = NO_NUMBER) -> float:
    return round(part / whole, 3) if whole else nothing


class ChartSeries:
    """Moments of one subject in one range, oldest first. Those of one piece of the time are one moment."""

    def __init__(self, every_ms: int) -> None:
        self._every_ms = every_ms
        self._moments: deque[Moment] = deque(maxlen=POINTS_KEPT)

    def add(self, moment: Moment) -> None:
        last = self._moments[-1] if self._moments else None
        if last is not None and last.at_ms // self._every_ms == moment.at_ms // self._every_ms:
            self._moments[-1] = last.then(moment)
        else:
            self._moments.append(moment)

    @property
    def points(self) -> list[ChartPoint]:
        return [moment.point for moment in self._moments]

    @property
    def latest(self) -> Moment:
        """The last moment. Of a series that has any."""
        return self._moments[-1]


class ChartHistory:
    """The moments of the mesh and of its models, in every range."""

    def __init__(self) -> None:
        self._series: dict[Subject, dict[str, ChartSeries]] = {}

    def add(self, moments: Moments) -> None:
        """Adds what was counted since the reading before, if there is one. Of too many models, those that are served
        stay.
        """
        for subject, moment in moments.items():
            if not moment.span_ms or (subject not in self._series and not self._has_room(moments)):
                continue
            series = self._series.setdefault(
                subject, {name: ChartSeries(every_ms) for name, every_ms in RANGES.items()}
            )
            for each in series.values():
                each.add(moment)

    def points(self, subject: Subject, range_: str) -> list[ChartPoint]:
        """All points of a chart, oldest first."""
        return self._series[subject][range_].points if subject in self._series else []

    def latest(self, subject: Subject, range_: str) -> ChartPoint | None:
        """The last point of a chart. It takes the place of the one before while both are of one piece of the time."""
        return self._series[subject][range_].latest.point if subject in self._series else None

    def _has_room(self, moments: Moments) -> bool:
        """Whether one more has room; makes it by forgetting a model that is served no more."""
        if len(self._series) <= MODELS_MAX:
            return True
        gone = self._series.keys() - moments.keys()
        if gone:
            del self._series[min(gone, key=lambda one: self._series[one]["5m"].latest.at_ms)]
        return bool(gone)
