"""Asks models that have a method `is_ready` whether they are ready (triton-spec 8), about once a second.

The answer is announced with the executor's registration. It decides about the readiness of the model at every gateway,
and about nothing else: a model that is not ready gets requests as before, as in Triton. The method runs on a thread of
its own, beside `execute`, so that a check that hangs delays no batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

LIMIT_S = 5.0
"""A model that has not answered after this time is not ready; Triton's limit."""


class Readiness:
    """The readiness of one instance. It is ready until the model says otherwise."""

    def __init__(self, ask: Callable[[], bool], name: str, limit_s: float = LIMIT_S) -> None:
        """ask: must not raise; called on another thread, one call at a time"""
        self.is_ready = True
        self._ask = ask
        self._name = name
        self._limit_s = limit_s
        self._asked: asyncio.Future[bool] | None = None

    async def look(self) -> None:
        """Asks once and updates `is_ready`. A call that has not returned in time is waited for the next time, not
        repeated.
        """
        if self._asked is None:
            answer = Future[bool]()
            # Kept until it has come: each wrapping leaves a callback at the future behind.
            self._asked = asyncio.wrap_future(answer)
            threading.Thread(target=self._answer, args=(answer,), name=f"{self._name} ready", daemon=True).start()
        asked = self._asked
        # Not `wait_for`: that would cancel the future, which the thread sets later.
        await asyncio.wait([asked], timeout=self._limit_s)
        if asked.done():
            self._asked = None
            self.is_ready = asked.result()
        else:
            self.is_ready = False

    def _answer(self, answer: Future[bool]) -> None:
        answer.set_result(self._ask())
