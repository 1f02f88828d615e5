"""A lock for which clients take turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from gateway.bounds.fair_lock import FairLock


async def test_clients_take_turns_and_each_keeps_its_order() -> None:
    lock, held = FairLock(), list[str]()

    async def hold(name: str) -> None:
        async with lock.held(name[0]):
            held.append(name)
            await asyncio.sleep(0)
            assert name == held[-1], "it is held by one at a time"

    async with asyncio.TaskGroup() as tasks:
        for name in ("a0", "a1", "a2", "a3", "b0", "b1"):
            tasks.create_task(hold(name))

    assert ["a0", "a1", "b0", "a2", "b1", "a3"] == held


async def test_who_is_cancelled_or_fails_keeps_nobody_waiting() -> None:
    lock, go_on, held = FairLock(), asyncio.Event(), list[int]()

    async def hold(number: int) -> None:
        try:
            with contextlib.suppress(ValueError):
                async with lock.held("a"):
                    held.append(number)
                    await go_on.wait()
                    raise ValueError
        finally:
            if number == 2:
                # It has just been given the lock, and has not gone on yet.
                tasks[3].cancel()

    tasks = [asyncio.create_task(hold(number)) for number in range(5)]
    while not held:
        await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[0].cancel()
    await asyncio.wait(tasks[:2])
    go_on.set()
    await asyncio.wait(tasks)

    assert [0, 2, 4] == held
    assert [True, True, False, True, False] == [task.cancelled() for task in tasks]


async def test_who_is_cancelled_keeps_the_lock_while_its_thread_works() -> None:
    lock, works, may_end, done = FairLock(), asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def work(name: str) -> None:
        loop.call_soon_threadsafe(works.set)
        assert may_end.wait(60)
        done.append(name)

    left = asyncio.create_task(lock.in_thread("a", work, "a"))
    await works.wait()
    works.clear()
    left.cancel()
    other = asyncio.create_task(lock.in_thread("b", work, "b"))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not works.is_set(), "two are at work"
    may_end.set()
    await asyncio.wait([left, other])

    assert left.cancelled()
    assert ["a", "b"] == done
