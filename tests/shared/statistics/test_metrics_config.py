"""Triton's option for metrics, and the quantiles of summaries."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.statistics.metrics_config import (
    SKETCH_BASE,
    SKETCH_BUCKET_MAX,
    SKETCH_US_MAX,
    MetricsConfig,
    parse_metrics_config,
    quantile_of,
    sketch_bucket,
)


def test_counters_are_shown_and_nothing_else_unless_asked_for() -> None:
    assert MetricsConfig(counter_latencies=True, summary_latencies=False, histogram_latencies=False) == (
        parse_metrics_config(())
    )


def test_each_setting_says_what_it_says_in_triton() -> None:
    items = ("counter_latencies=false", "summary_latencies=true", "histogram_latencies=true")
    quantiles = "summary_quantiles=0.5:0.05,0.99:0.001"

    assert MetricsConfig(
        counter_latencies=False, summary_latencies=True, histogram_latencies=True, quantiles=(0.5, 0.99)
    ) == parse_metrics_config((*items, quantiles))


def test_a_value_that_was_split_at_its_commas_is_whole_again() -> None:
    """In the environment, commas separate the items too."""
    items = ["summary_latencies=true", "summary_quantiles=0.5:0.05", "0.9:0.01"]

    assert (0.5, 0.9) == parse_metrics_config(items).quantiles


@pytest.mark.parametrize(
    "item",
    ["counter_latencies", "latencies=true", "summary_latencies=yes", "summary_quantiles=0.5", "summary_quantiles=2:0"],
)
def test_what_means_nothing_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unknown"):
        parse_metrics_config([item])


@given(st.lists(st.integers(1, SKETCH_US_MAX), min_size=1), st.floats(0, 1))
@example([2], 0.5)
def test_a_quantile_is_off_by_no_more_than_half_a_bucket(durations: list[int], quantile: float) -> None:
    exact = sorted(durations)[max(0, math.ceil(quantile * len(durations)) - 1)]

    read = quantile_of(Counter(map(sketch_bucket, durations)), quantile)

    assert math.isclose(exact, read, rel_tol=SKETCH_BASE - 1)


@given(st.integers(0, 10**15))
def test_buckets_are_bounded_and_rise_with_the_duration(us: int) -> None:
    assert 0 <= sketch_bucket(us) <= sketch_bucket(us + 1) <= SKETCH_BUCKET_MAX


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(quantile_of({}, 0.5))
