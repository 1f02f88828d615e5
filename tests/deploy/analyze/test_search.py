"""The search, on made-up costs: what it finds, how often it measures, and that it goes on where it was."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deploy.analyze.command import exit_code
from deploy.analyze.search import Bounds, Conclusion, Knob, Measured, Setting, Trial, change, follow, is_better

SIZES = Knob("size", (1, 2, 4, 8, 16, 32))
COPIES = Knob("copies", (1, 2, 4))
WAYS = Knob("way", ("direct", "oldest"))
PLACES = Knob("places", (8, 16, 32), only_with=("way", "oldest"))
KNOBS = (SIZES, WAYS, PLACES, COPIES)
START: Setting = (("size", 4), ("way", "direct"), ("places", 8), ("copies", 1))

Cost = Callable[[Setting], Measured]


def cost(setting: Setting) -> Measured:
    """A model that is best at 16 rows and two copies; more of either costs latency and memory."""
    values = dict(setting)
    size, copies = int(values["size"]), int(values["copies"])
    rate = 1000.0 * min(size, 16) ** 0.5 * (1.4 if copies == 2 else 1.0) * (1.2 if values["way"] == "oldest" else 1.0)
    rate *= 1.1 if values["way"] == "oldest" and values["places"] != 8 else 1.0
    return Measured(rate, p50_ms=size, p99_ms=2.0 * size, memory_bytes=100 * copies + size, noise=0.01)


def searched(measure: Cost, bounds: Bounds, trials_max: int = 100) -> tuple[Conclusion, dict[Setting, Measured]]:
    found: dict[Setting, Measured] = {}
    while isinstance(move := follow(START, KNOBS, found, bounds, trials_max), Trial):
        assert move.setting not in found
        found[move.setting] = measure(move.setting)
    return move, found


def test_it_finds_the_best_with_a_part_of_all_settings() -> None:
    end, found = searched(cost, Bounds())

    assert Conclusion((("size", 16), ("way", "oldest"), ("places", 16), ("copies", 2)), complete=True) == end
    assert 14 >= len(found)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (Bounds(p99_ms=16), {"size": 8, "copies": 2}),
        (Bounds(memory_bytes=150), {"size": 16, "copies": 1}),
        (Bounds(p99_ms=16, memory_bytes=107), {"size": 4, "copies": 1}),
        # The given setting is beyond them: within them comes before throughput.
        (Bounds(p99_ms=4), {"size": 2, "copies": 2}),
    ],
)
def test_bounds_come_before_throughput(bounds: Bounds, expected: dict[str, int]) -> None:
    end, found = searched(cost, bounds)

    assert expected.items() <= dict(end.best).items()
    assert 0 == bounds.excess(found[end.best])


def test_where_nothing_keeps_the_bounds_it_comes_as_near_as_it_can() -> None:
    end, found = searched(cost, Bounds(p99_ms=1))

    assert 1 == dict(end.best)["size"]
    assert Bounds(p99_ms=1).excess(found[end.best])


def test_noise_moves_nothing() -> None:
    chance = random.Random(3)

    def flat(setting: Setting) -> Measured:
        return Measured(1000 * chance.uniform(0.95, 1.05), noise=0.1)

    end, _ = searched(flat, Bounds())

    assert START == end.best
    loud, quiet = Measured(1090, noise=0.1), Measured(1000, noise=0.01)
    assert not is_better(loud, quiet, Bounds())
    assert is_better(Measured(1090, noise=0.01), quiet, Bounds())
    assert not is_better(Measured(1020), Measured(1000), Bounds())


def test_what_does_not_work_is_never_chosen_but_left() -> None:
    def fails(setting: Setting) -> Measured:
        return Measured(problem="no memory") if dict(setting)["size"] in (4, 16) else cost(setting)

    end, _ = searched(fails, Bounds())

    assert 8 == dict(end.best)["size"]


def test_it_goes_on_where_it_was() -> None:
    end, found = searched(cost, Bounds())
    for count in range(len(found) + 1):
        known = dict(list(found.items())[:count])
        while isinstance(move := follow(START, KNOBS, known, Bounds(), 100), Trial):
            known[move.setting] = cost(move.setting)
        assert (end, found) == (move, known)


def test_the_number_of_trials_ends_it_with_the_best_so_far() -> None:
    end, found = searched(cost, Bounds(), trials_max=3)

    assert 3 == len(found)
    assert not end.complete
    assert found[end.best].steps_per_s == max(one.steps_per_s for one in found.values())


def test_a_knob_that_means_nothing_is_not_turned() -> None:
    assert PLACES.turned(START, 1) is None
    oldest = WAYS.turned(START, 1)
    assert oldest is not None
    turned = PLACES.turned(oldest, 1)
    assert turned is not None
    assert "places 8 -> 16" == change(oldest, turned)
    assert SIZES.turned((("copies", 1),), 1) is None


@pytest.mark.parametrize(
    ("complete", "fits", "code"), [(True, True, 0), (True, False, 1), (False, True, 3), (False, False, 3)]
)
def test_a_search_that_ended_too_soon_does_not_say_that_nothing_fits(*, complete: bool, fits: bool, code: int) -> None:
    """It ended with 1 where nothing that fits was known yet."""
    assert code == exit_code(complete=complete, fits=fits)
