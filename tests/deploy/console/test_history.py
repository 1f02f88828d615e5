"""What charts show follows from readings, over minutes and an hour."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace

import pytest

from deploy.console.history import (
    BOUNDS_MS,
    MESH,
    MODELS_MAX,
    NO_NUMBER,
    POINTS_KEPT,
    RANGES,
    ChartHistory,
    ChartPoint,
    Moment,
    Subject,
    grown,
    moments_between,
    percentiles_ms,
)
from deploy.console.snapshot import Snapshot
from shared.statistics.meter import REQUEST_TIME, LoadMeter, Phase
from shared.statistics.tally import NULL_ROWS, added
from shared.store.waiting_line import WaitingLine
from tests.deploy.console.readings import counted, executor, reading

SUM = Subject("sum", "1")


def measured(*values_ms: float) -> dict[str, int]:
    """What a meter counts of requests that took so long in all, and waited in a queue for half of it."""
    meter = LoadMeter()
    for ms in values_ms:
        meter.distribution(REQUEST_TIME).add(round(ms * 1e6))
        meter.phase(Phase.QUEUE).add(round(ms * 5e5))
    return meter.take()


def point(before: Snapshot | None, now: Snapshot, subject: Subject = SUM) -> ChartPoint:
    return moments_between(before, now, grown(before, now))[subject].point


def test_rates_means_and_percentiles_are_of_the_time_between_two_readings() -> None:
    early = counted(steps=100, batches=10, rows=2, ms=90)
    late = added([early, counted(steps=60, batches=15, rows=2, ms=90), measured(*[4.0] * 60), {NULL_ROWS: 6}])
    line = WaitingLine(first=3)
    before = reading(10_000, executor("a"), counts=early)
    now = reading(12_000, executor("a"), counts=late, line=line)

    seen = point(before, now)

    # Three rows of the batches were filled by no request, and each batch has room for eight.
    assert (30.0, 90.0, 24 / 15, 24 / 120, 3) == (
        seen.steps_per_s,
        seen.request_ms,
        seen.batch,
        seen.fill,
        seen.waiting,
    )
    assert {"request", "queue"} == set(seen.times)
    assert all(2.5 < value <= 5.0 for value in seen.times["request"])
    assert all(1.0 < value <= 2.5 for value in seen.times["queue"])
    assert seen == point(before, now, MESH)


@pytest.mark.parametrize("seed", range(20))
def test_a_percentile_lies_in_the_bucket_of_the_value_that_it_stands_for(seed: int) -> None:
    chance = random.Random(seed)
    values = sorted(chance.lognormvariate(1, 2) for _ in range(chance.randint(1, 400)))
    buckets = [0] * len(BOUNDS_MS)
    for value in values:
        buckets[bisect_left(BOUNDS_MS[1:], value)] += 1

    for share, found in zip((0.5, 0.95, 0.99), percentiles_ms(buckets), strict=True):
        true = next(value for number, value in enumerate(values, 1) if number >= share * len(values))
        bucket = bisect_left(BOUNDS_MS[1:], true)
        assert BOUNDS_MS[bucket] <= found <= BOUNDS_MS[min(bucket + 1, len(BOUNDS_MS) - 1)]


def test_what_took_longer_than_any_bucket_counts_as_the_last_bound() -> None:
    assert (10_000, 10_000, 10_000) == percentiles_ms([0] * (len(BOUNDS_MS) - 1) + [7])


def test_nothing_is_said_of_the_time_before_the_first_reading_across_a_gap_or_of_a_new_load() -> None:
    first = reading(10_000, executor("a"), counts=counted(steps=100, batches=10, rows=2))
    late = reading(60_000, executor("a"), counts=counted(steps=900, batches=90, rows=2))
    without = reading(9_000, executor("a"))

    for before, now in ((None, first), (first, late), (without, first)):
        assert {MESH} == moments_between(before, now, grown(before, now)).keys()
        seen = point(before, now, MESH)

        assert (0.0, NO_NUMBER, NO_NUMBER, NO_NUMBER, {}) == (
            seen.steps_per_s,
            seen.request_ms,
            seen.batch,
            seen.fill,
            seen.times,
        )


def test_an_hour_is_the_same_moments_in_larger_pieces() -> None:
    chance = random.Random(7)
    history = ChartHistory()
    at_ms, steps = 12_000, 0
    for _ in range(600):
        more = chance.randrange(5)
        steps += more
        history.add({MESH: Moment(at_ms, span_ms=1000, steps=more, request_ns=more * 2_000_000, live=more)})
        at_ms += 1000

    fine, coarse = (history.points(MESH, name) for name in RANGES)

    assert (POINTS_KEPT, 50) == (len(fine), len(coarse))
    assert steps == pytest.approx(sum(one.steps_per_s * 12 for one in coarse), abs=0.3)
    assert {2.0, NO_NUMBER} >= {one.request_ms for one in coarse}
    assert (fine[-1].at_ms, fine[-1].live) == (coarse[-1].at_ms, coarse[-1].live)
    assert history.latest(MESH, "1h") == coarse[-1]


def test_charts_begin_with_the_second_reading_and_go_on_while_no_executor_is_left() -> None:
    first = reading(10_000, executor("a"), counts=counted(steps=1, batches=1, rows=1))
    outage = reading(11_000, executor("a", alive=False), line=WaitingLine(first=2))
    history = ChartHistory()

    for before, now in ((None, first), (first, outage)):
        history.add(moments_between(before, now, grown(before, now)))

    assert [(11_000, 0.0, 2)] == [(one.at_ms, one.steps_per_s, one.waiting) for one in history.points(MESH, "5m")]


def test_what_is_kept_is_bounded_and_models_that_are_gone_make_room() -> None:
    history = ChartHistory()
    many = {Subject(f"model {number}", "1"): Moment(1000, 1000) for number in range(MODELS_MAX + 10)}
    for second in range(2 * POINTS_KEPT * 12):
        history.add({MESH: Moment(1000 * second, 1000)})
    history.add({MESH: Moment(10_000_000, 1000), **many})

    kept = [subject for subject in many if history.points(subject, "5m")]
    assert list(many)[:MODELS_MAX] == kept
    assert [POINTS_KEPT] * 2 == [len(history.points(MESH, name)) for name in RANGES]
    assert history.latest(Subject("model 41", "1"), "1h") is None

    history.add({MESH: Moment(10_001_000, 1000), **{one: Moment(10_001_000, 1000) for one in list(many)[1:]}})
    assert [] == history.points(next(iter(many)), "5m")
    assert MODELS_MAX == sum(bool(history.points(subject, "5m")) for subject in many)


def test_a_count_that_jumps_beyond_all_bounds_ends_no_chart() -> None:
    """One number in Redis may be wrong."""
    huge = dict.fromkeys(measured(4.0), 2**62)
    before, now = reading(10_000, executor("a"), counts={}), reading(11_000, executor("a"), counts=huge)

    moments = moments_between(before, now, grown(before, now))
    history = ChartHistory()
    history.add(moments)
    history.add({subject: replace(moment, at_ms=11_001) for subject, moment in moments.items()})

    assert {"request", "queue"} == set(history.points(SUM, "1h")[-1].times)
