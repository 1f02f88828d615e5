"""The estimate of a wait from what a leader has seen: its parts, one by one. How right it is: tests/scheduler/core."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shared.contract.forecast import (
    WAIT_MS_MAX,
    Forecast,
    LineForecast,
    Outlook,
    _bias,
    _trigamma,
    decode_forecast,
    encode_forecast,
    outlook,
)
from shared.store.reading import FAILURES

LINES = some.builds(
    LineForecast,
    version=some.just("1"),
    observed_ms=some.integers(0, 600_000),
    freed=some.integers(0, 64),
    spread=some.floats(1, 64),
    expiries_ms=some.lists(some.integers(0, 600_000), max_size=64).map(lambda left: tuple(sorted(left))),
)


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert {"place": 3} == outlook(LineForecast("1"), 3).facts
    assert {"place": 3} == outlook(LineForecast("1", observed_ms=9000, freed=2), 3).facts


def test_idle_timeouts_are_what_is_known_before_a_slot_became_free() -> None:
    line = LineForecast("1", expiries_ms=(4000, 9000))

    assert Outlook(2, 9000, 0, None) == outlook(line, 2)
    assert Outlook(3) == outlook(line, 3)


def test_an_idle_timeout_that_comes_sooner_widens_the_estimate() -> None:
    line = LineForecast("1", observed_ms=60_000, freed=30)
    slow, soon = outlook(line, 20), outlook(LineForecast("1", (), 60_000, 30, 1.0, (5,) * 20), 20)

    assert slow.low_ms is not None
    assert slow.low_ms > 5000
    assert (5, slow.wait_ms, slow.high_ms) == (soon.low_ms, soon.wait_ms, soon.high_ms)


def test_a_wait_of_more_than_a_day_is_not_foretold() -> None:
    assert Outlook(2000) == outlook(LineForecast("1", observed_ms=WAIT_MS_MAX // 100, freed=3), 2000)


@given(LINES, some.integers(1, 10_000))
def test_an_estimate_lies_within_its_bounds_and_grows_with_the_place(line: LineForecast, place: int) -> None:
    here, behind = outlook(line, place), outlook(line, place + 1)

    if here.high_ms is not None:
        assert here.wait_ms is not None
        assert here.low_ms is not None
        assert 0 <= here.low_ms <= here.wait_ms <= here.high_ms
        assert behind.wait_ms is None or behind.high_ms is None or behind.wait_ms >= here.wait_ms
    else:
        assert here.low_ms in (None, 0)


@pytest.mark.parametrize(
    ("x", "psi", "trigamma"), [(1, -0.5772157, 1.6449341), (2, 0.4227843, 0.6449341), (10, 2.2517526, 0.1051663)]
)
def test_the_short_series_are_as_near_as_they_say(x: float, psi: float, trigamma: float) -> None:
    assert psi - math.log(x) == pytest.approx(_bias(x), abs=0.01)
    assert trigamma == pytest.approx(_trigamma(x), abs=0.03)


def test_more_slots_seen_make_a_narrower_estimate() -> None:
    widths = [
        (found.high_ms or 0) - (found.low_ms or 0)
        for found in (outlook(LineForecast("1", observed_ms=1000 * seen, freed=seen), 8) for seen in (3, 10, 30, 63))
    ]

    assert all(wide > narrow for wide, narrow in pairwise(widths))


def test_a_forecast_says_who_stands_where_and_what_comes_behind() -> None:
    lines = (LineForecast("1", ("m||a", "m||b"), 9000, 9), LineForecast("2", ("m||c",)))
    read = decode_forecast(encode_forecast(lines))

    for forecast in (read, Forecast(lines)):
        assert (2, 1) == tuple(found.place for name in ("m||b", "m||c") if (found := forecast.of(name)))
        assert forecast.of("m||x") is None
        assert outlook(lines[0], 3) == forecast.behind("1")
        assert forecast.behind("3") is None


@pytest.mark.parametrize(
    "line",
    [
        LineForecast("1", observed_ms=-1),
        LineForecast("1", freed=-1),
        LineForecast("1", spread=0.5),
        LineForecast("1", spread=float("nan")),
        LineForecast("1", spread=float("inf")),
        LineForecast("1", observed_ms=1 << 60),
        LineForecast("1", expiries_ms=(-5,)),
    ],
)
def test_impossible_forecasts_are_not_read(line: LineForecast) -> None:
    with pytest.raises(FAILURES):
        decode_forecast(encode_forecast((line,)))
