"""An engine's thread: one call at a time, in order, and what it raises is the caller's."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from executor.workers.engine_thread import EngineThread
from tests.executor.patience import until

SOON_S = 60


async def test_calls_are_made_in_order_and_one_that_nobody_waits_for_any_more_is_not_made() -> None:
    thread = EngineThread("engine")
    begun, go_on = threading.Event(), threading.Event()
    made: list[str] = []

    def slow() -> str:
        begun.set()
        go_on.wait(SOON_S)
        made.append("slow")
        return threading.current_thread().name

    first, given_up, last = thread.start(slow), thread.start(made.append, "given up"), thread.start(made.append, "last")
    await asyncio.to_thread(begun.wait, SOON_S)
    given_up.cancel()
    go_on.set()

    assert "engine" == await first
    await last
    assert ["slow", "last"] == made
    thread.stop()


async def test_what_a_call_raises_is_the_callers_and_the_thread_goes_on() -> None:
    thread = EngineThread("engine")

    with pytest.raises(SystemExit):
        await thread.start(sys.exit, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(thread.run, lambda: divmod(1, 0) and None)
    assert 7 == await thread.start(int, "7")
    thread.stop()


async def test_a_thread_that_waits_keeps_nothing_of_its_last_call() -> None:
    """A batch has its inputs, its results, and who waits for them."""

    class Batch:
        def ran(self) -> Batch:
            return Batch()

    thread = EngineThread("engine")
    given = Batch()
    result = await thread.start(given.ran)
    kept = [weakref.ref(given), weakref.ref(result)]
    del given, result

    await until(lambda: all(one() is None for one in kept), "they are gone")
    thread.stop()


def test_a_loop_that_is_closed_meanwhile_does_not_end_the_thread() -> None:
    thread = EngineThread("engine")
    go_on = threading.Event()

    async def leave() -> None:
        thread.start(go_on.wait, SOON_S)

    asyncio.run(leave())
    go_on.set()

    thread.run(lambda: None)
    thread.stop()


async def test_a_thread_goes_on_while_another_one_waits_for_what_it_has_begun() -> None:
    beginning, waiting = EngineThread("begins"), EngineThread("waits")
    over = threading.Event()
    names: list[str] = []

    def begin(number: int) -> Callable[[], int]:
        names.append(threading.current_thread().name)

        def end() -> int:
            over.wait(SOON_S)
            names.append(threading.current_thread().name)
            return number

        return end

    first, second = (beginning.start_with(waiting, partial(begin, number)) for number in (1, 2))
    between = beginning.start(names.append, "between")
    await between
    assert ["begins", "begins", "between"] == names
    assert not beginning.is_idle

    over.set()
    assert [1, 2] == [await first, await second]
    assert ["waits", "waits"] == names[3:]
    assert beginning.is_idle
    beginning.stop()
    waiting.stop()


async def test_what_fails_at_its_begin_or_its_end_is_the_callers_and_both_threads_go_on() -> None:
    beginning, waiting = EngineThread("begins"), EngineThread("waits")
    go_on = threading.Event()

    def fails() -> Callable[[], int]:
        raise SystemExit(3)

    def ends_badly() -> Callable[[], int]:
        return lambda: divmod(1, 0)[0]

    def begins_well() -> Callable[[], int]:
        return lambda: 7

    with pytest.raises(SystemExit):
        await beginning.start_with(waiting, fails)
    with pytest.raises(ZeroDivisionError):
        await beginning.start_with(waiting, ends_badly)
    beginning.start(go_on.wait, SOON_S)
    given_up, last = (beginning.start_with(waiting, call) for call in (fails, begins_well))
    given_up.cancel()
    go_on.set()
    assert 7 == await last
    assert beginning.is_idle
    beginning.stop()
    waiting.stop()
