"""What comes again and again is said at intervals that double, with a count, and nothing is remembered for ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.process.repeats import KNOWN_MAX, LONGEST_INTERVAL_S, Repeats


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_intervals_double_up_to_the_longest_and_every_repeat_is_counted() -> None:
    clock, said = Clock(), list[tuple[float, int]]()
    repeats = Repeats(clock)

    for second in range(400):
        clock.now_s = second
        held = repeats.suppressed("redis away")
        if held is not None:
            said.append((second, held))

    assert [0, 2, 6, 14, 30, 62, 122, 182, 242, 302, 362] == [second for second, _ in said]
    assert 363 == len(said) + sum(held for _, held in said)


def test_the_clock_is_the_one_there_is_when_a_process_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the simulation logs would depend on how fast the machine is, and a seed would tell two stories."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    repeats = Repeats()
    assert [0, None] == [repeats.suppressed("x"), repeats.suppressed("x")]

    clock.now_s = LONGEST_INTERVAL_S + 1

    assert [1, None] == [repeats.suppressed("x"), repeats.suppressed("x")]


def test_what_has_not_come_for_a_while_is_news_again() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    assert [0, None] == [repeats.suppressed("x"), repeats.suppressed("x")]

    clock.now_s = LONGEST_INTERVAL_S + 1

    assert [1, None] == [repeats.suppressed("x"), repeats.suppressed("x")]


def test_only_so_many_are_remembered() -> None:
    repeats = Repeats(Clock())
    for number in range(KNOWN_MAX + 1):
        assert 0 == repeats.suppressed(number)

    assert [0, None] == [repeats.suppressed(0), repeats.suppressed(KNOWN_MAX)]


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_several_threads_may_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models log from the threads of their instances."""
    monkeypatch.setattr("shared.process.repeats.KNOWN_MAX", 1)
    repeats = Repeats(Clock())

    def told(thread: int) -> bool:
        return all(repeats.suppressed((thread, number)) == 0 for number in range(20_000))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(told, range(4)))
