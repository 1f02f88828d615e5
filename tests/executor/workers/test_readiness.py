"""A model's own word on its readiness: asked for in time, never twice at once, and delaying nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from executor.workers.readiness import Readiness


async def test_a_model_is_as_ready_as_it_says() -> None:
    answers = [True, False, True]
    readiness = Readiness(lambda: answers.pop(0), "m")

    for expected in (True, False, True):
        await readiness.look()
        assert expected is readiness.is_ready


async def test_a_model_that_does_not_answer_is_not_ready_until_it_has_answered() -> None:
    answer, begun, asked = threading.Event(), threading.Event(), list[int]()

    def ask() -> bool:
        asked.append(1)
        begun.set()
        return answer.wait(60)

    readiness = Readiness(ask, "m", limit_s=0.01)
    await readiness.look()
    await readiness.look()
    assert await asyncio.to_thread(begun.wait, 60)
    assert (False, 1) == (readiness.is_ready, len(asked))
    assert readiness._asked is not None
    assert 1 == len(readiness._asked._callbacks), "a look leaves none behind"

    answer.set()
    await until(readiness, lambda: readiness.is_ready)
    assert 1 == len(asked)


async def until(readiness: Readiness, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await readiness.look()
