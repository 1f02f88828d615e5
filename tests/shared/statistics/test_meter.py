"""What a process measures: sums by bucket, handed on once, with the trace of the latest value."""

from __future__ import annotations

from shared.statistics.meter import (
    SECOND,
    TIME_BOUNDS_NS,
    TIME_BOUNDS_S,
    Exemplar,
    LoadMeter,
    Phase,
    RoundTripMeter,
    histogram_of,
    names_of,
    phase_field,
)
from shared.statistics.tally import added, packed, statistics_of, unpacked
from shared.traces.spans import SpanName


def test_a_value_on_a_bound_belongs_to_the_bucket_below_and_one_below_zero_counts_as_zero() -> None:
    meter = LoadMeter()
    times = meter.phase(Phase.QUEUE)
    for value in (-7, TIME_BOUNDS_NS[0], TIME_BOUNDS_NS[0] + 1, 11 * SECOND):
        times.add(value)

    found = histogram_of(meter.take(), phase_field(Phase.QUEUE), TIME_BOUNDS_S)

    assert [2, 1, *[0] * 12, 1] == list(found.buckets)
    assert 2 * TIME_BOUNDS_NS[0] + 1 + 11 * SECOND == found.total


def test_what_was_taken_is_not_taken_again_unless_it_is_given_back() -> None:
    meter = LoadMeter()
    meter.phase(Phase.COMPUTE).add(5, times=3)
    meter.counts["some"] += 2
    taken = meter.take()

    assert {} == meter.take()
    meter.give_back(taken)
    meter.phase(Phase.COMPUTE).add(5)
    assert {"some": 2, "phase_compute:0": 4, "phase_compute:sum": 20} == meter.take()


def test_an_exemplar_is_the_latest_of_its_bucket_and_stays_when_the_sums_are_taken() -> None:
    meter = LoadMeter()
    times = meter.phase(Phase.REPLY)
    for value, trace in ((1, "first"), (2, "second"), (SECOND, "third")):
        times.add(value)
        times.show(value, trace, 4_000_000)
    meter.take()

    assert [
        Exemplar("phase_reply", 0, "second", 2, 4),
        Exemplar("phase_reply", 10, "third", SECOND, 4),
    ] == meter.exemplars


def test_sums_travel_as_counts_do_and_disturb_no_statistics() -> None:
    meter = LoadMeter()
    meter.phase(Phase.QUEUE).add(3)
    sums = added([unpacked(packed(meter.take())), {"success_count": 1}])

    statistics = statistics_of("m", "1", sums)

    assert (1, 0, []) == (statistics.durations["success"].count, statistics.execution_count, list(statistics.batches))


def test_round_trips_are_found_by_service_and_script() -> None:
    trips = RoundTripMeter("gateway")
    trips.took("submit", 5)
    trips.took("submit", 6)
    trips.took("cancel", 7)

    assert ["round_trip/gateway/cancel", "round_trip/gateway/submit"] == names_of(trips.meter.take(), "round_trip/")


def test_phases_are_called_as_their_spans() -> None:
    assert {phase.value for phase in Phase} <= {name.value for name in SpanName}
