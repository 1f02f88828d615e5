"""Triton's option `--metrics-config`: which latencies metrics show, and how. Pure.

Gateways show them, executors count what a summary or a histogram needs; both are given the same option.
Source: Triton core, metric_model_reporter.cc (ParseConfig).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

QUANTILES = ((0.5, 0.05), (0.9, 0.01), (0.95, 0.001), (0.99, 0.001), (0.999, 0.001))
"""Triton's default: each quantile and its allowed error."""
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)

SKETCH_BASE = 1.04
"""Ratio of the logarithmic buckets from which quantiles are read: each is 4 % wide, so a quantile is off by 2 % at
most.
"""
SKETCH_US_MAX = 10**10
"""Longer durations (nearly three hours) share the last bucket, so that there are no more than 588."""
SKETCH_BUCKET_MAX = math.ceil(math.log(SKETCH_US_MAX) / math.log(SKETCH_BASE))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What `/metrics` shows of durations.

    counter_latencies    the `_duration_us` counters
    summary_latencies    the `_summary_us` summaries, with these quantiles
    histogram_latencies  the histogram of the time to the first response
    """

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = tuple(quantile for quantile, _ in QUANTILES)


def parse_metrics_config(items: Sequence[str]) -> MetricsConfig:
    """Reads `<setting>=<value>` items. Raises ValueError for a setting or value without a meaning.

    items  a value with commas may come in parts: an item without `=` continues the one before
    """
    values: dict[str, str] = {}
    name = ""
    for item in items:
        setting, equals, value = item.partition("=")
        if equals:
            name = setting.strip()
            values[name] = value.strip()
        elif name:
            values[name] += f",{item.strip()}"
        else:
            raise ValueError(f"'{item}': expected <setting>=<value>")
    quantiles = values.pop("summary_quantiles", "")
    config = MetricsConfig()
    for name, value in values.items():
        config = replace(config, **{name: _flag(name, value)})
    if quantiles:
        config = replace(config, quantiles=tuple(_quantile(pair) for pair in quantiles.split(",")))
    return config


def _flag(name: str, value: str) -> bool:
    if name not in ("counter_latencies", "summary_latencies", "histogram_latencies"):
        raise ValueError(f"unknown metrics setting '{name}'")
    if value not in ("true", "false"):
        raise ValueError(f"'{name}={value}': expected true or false")
    return value == "true"


def _quantile(pair: str) -> float:
    """`<quantile>:<error>`; the error is Triton's bound on its own sketch, ours is `SKETCH_BASE`."""
    quantile, colon, error = pair.partition(":")
    try:
        if colon and float(error) >= 0 and 0 <= float(quantile) <= 1:
            return float(quantile)
    except ValueError:
        pass
    raise ValueError(f"'{pair}' of summary_quantiles: expected <quantile>:<error>, for instance 0.99:0.001")


# -- quantiles ---------------------------------------------------------------------------------------------------------


def sketch_bucket(us: int) -> int:
    """The bucket of a duration: 0 up to 1 us; b for durations in (base^(b-1), base^b]."""
    if us <= 1:
        return 0
    return min(SKETCH_BUCKET_MAX, math.ceil(math.log(us) / math.log(SKETCH_BASE) - 1e-9))


def quantile_of(buckets: Mapping[int, int], quantile: float) -> float:
    """The duration, us, that this share of the counted durations did not exceed; NaN if none was counted."""
    if not buckets:
        return math.nan
    ordered = sorted(buckets)
    upto = list(accumulate(buckets[bucket] for bucket in ordered))
    rank = max(1, math.ceil(quantile * upto[-1]))
    bucket = ordered[bisect_left(upto, rank)]
    # The value whose relative error is the same at both ends of the bucket.
    return 1.0 if bucket == 0 else 2 * SKETCH_BASE**bucket / (SKETCH_BASE + 1)
