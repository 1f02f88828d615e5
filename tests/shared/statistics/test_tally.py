"""Counts: what they add up to, and that the scripts count an answered request exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.statistics.tally import (
    COMPUTE,
    DURATIONS,
    BatchStatistics,
    Duration,
    FailureReason,
    Response,
    Timings,
    added,
    execution,
    failure,
    packed,
    response_counts,
    statistics_of,
    success,
    unpacked,
)

TIMES = Timings(5, 70, 9)


def batch_of(real: int, *, null: int, ended_ms: int = 1) -> list[dict[str, int]]:
    counts = [success(rows=1, total_ns=100, queue_ns=10, compute=TIMES) for _ in range(real)]
    return [*counts, execution(batch_size=real + null, compute=TIMES, ended_ms=ended_ms)]


def test_null_rows_are_part_of_the_batch_size_and_no_inferences() -> None:
    """The example of triton-spec 1.4: 3 requests in 2 executions of a batch of 2."""
    read = statistics_of("m", "1", added([*batch_of(2, null=0), *batch_of(1, null=1)]))

    assert (3, 2) == (read.inference_count, read.execution_count)
    twice = [Duration(2, 2 * ns) for _, ns in TIMES.items()]
    assert [BatchStatistics(2, *twice)] == list(read.batches)


def test_every_request_of_a_batch_counts_its_compute_time() -> None:
    read = statistics_of("m", "1", added(batch_of(3, null=0)))

    assert Duration(3, 210) == read.durations["compute_infer"]
    assert Duration(3, 300) == read.durations["success"]
    assert Duration(3, 30) == read.durations["queue"]
    assert Duration() == read.durations["fail"]


def test_a_request_counts_the_rows_that_it_brings() -> None:
    read = statistics_of("m", "1", success(rows=64, total_ns=1, queue_ns=1, compute=TIMES))

    assert (1, 64) == (read.durations["success"].count, read.inference_count)


def test_failures_count_under_their_reason_and_all_reasons_are_there() -> None:
    read = statistics_of(
        "m", "1", added([failure(FailureReason.CANCELED, total_ns=7), failure(FailureReason.BACKEND, total_ns=8)])
    )

    assert {"REJECTED": 0, "CANCELED": 1, "BACKEND": 1, "OTHER": 0} == read.failures
    assert Duration(2, 15) == read.durations["fail"]
    assert 0 == read.inference_count


def test_a_cache_hit_is_a_success_without_computing() -> None:
    missed = [*batch_of(1, null=0), {"cache_miss_count": 1, "cache_miss_ns": 3}]
    hit = {"success_count": 1, "success_ns": 20, "cache_hit_count": 1, "cache_hit_ns": 4}
    read = statistics_of("m", "1", added([*missed, hit]))

    assert (2, 2) == (read.durations["success"].count, read.durations["queue"].count)
    assert [1, 1, 1] == [read.durations[name].count for name in COMPUTE]
    assert (1, Duration(1, 4), Duration(1, 3)) == (
        read.inference_count,
        read.durations["cache_hit"],
        read.durations["cache_miss"],
    )
    assert Duration(2, 120) == read.durations["success"]


def test_answers_of_a_decoupled_model_count_by_their_place() -> None:
    streams = [[Response(5), Response(7), Response(1, is_empty=True)], [Response(6), Response(8, failed=True)]]
    read = statistics_of("m", "1", added(map(response_counts, streams))).responses

    once = {"success": Duration(1, 7), "fail": Duration(1, 8), "empty_response": Duration(), "cancel": Duration()}
    assert ["0", "1", "2"] == list(read)
    assert Duration(2, 11) == read["0"]["success"]
    assert {"compute_infer": Duration(2, 15), "compute_output": Duration(2, 0), **once} == read["1"]
    # The end of a stream that gives nothing was not computed.
    assert (Duration(1, 1), Duration()) == (read["2"]["empty_response"], read["2"]["compute_infer"])


def test_nothing_counted_reads_as_zeros() -> None:
    read = statistics_of("m", "1", {})

    assert dict.fromkeys(DURATIONS, Duration()) == read.durations
    assert (0, 0, 0, []) == (read.last_inference, read.inference_count, read.execution_count, list(read.batches))


COUNTS = st.dictionaries(st.sampled_from(["success_count", "success_ns", "last_inference_ms"]), st.integers(0, 2**50))


@given(st.lists(COUNTS))
def test_adding_sums_every_field_but_the_time_of_the_last_inference(several: list[dict[str, int]]) -> None:
    total = added(several)

    for name in ("success_count", "success_ns"):
        assert sum(counts.get(name, 0) for counts in several) == total.get(name, 0)
    assert max((counts.get("last_inference_ms", 0) for counts in several), default=0) == total.get(
        "last_inference_ms", 0
    )


@given(COUNTS)
def test_packing_keeps_counts(counts: dict[str, int]) -> None:
    assert counts == unpacked(packed(counts))


def test_a_clock_that_goes_back_never_makes_a_sum_smaller() -> None:
    assert {"queue_ns": 0} == unpacked(packed({"queue_ns": -5}))


def test_a_clock_that_is_not_set_yet_makes_no_sum_that_cannot_be_packed() -> None:
    """A second's requests, each of which seems to have waited since 1970."""
    assert {"queue_ns": (1 << 63) - 1} == unpacked(packed({"queue_ns": 11 * 1_800_000_000 * 10**9}))


def test_no_counts_pack_to_nothing() -> None:
    assert b"" == packed({})
    assert {} == unpacked(b"")


@pytest.mark.parametrize("reason", list(FailureReason))
def test_a_reason_is_its_own_field(reason: FailureReason) -> None:
    assert {"fail_count": 1, "fail_ns": 2, f"fail_{reason.value}": 1} == failure(reason, total_ns=2)
