"""Asks models that have an `is_ready` of their own whether they are (triton-spec 8), about once a second.

The answer is announced with the executor's registration; the readiness of the model at every gateway goes by it, and
nothing else does: a model that is not ready gets requests as before, as in Triton. It is asked on a thread of its own,
beside whatever `execute` does, so that a check that hangs delays no batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

LIMIT_S = 5.0
"""A model that has not answered after this time is not ready; Triton's limit."""


class Readiness:
    """What one instance says of itself. Ready until it says otherwise."""

    def __init__(self, ask: Callable[[], bool], name: str, limit_s: float = LIMIT_S) -> None:
        """ask: must not raise; called on another thread, never twice at a time."""
        self.is_ready = True
        self._ask = ask
        self._name = name
        self._limit_s = limit_s
        self._asked: Future[bool] | None = None

    async def look(self) -> None:
        """Brings `is_ready` up to date. A question that was not answered in time is not asked again before it is."""
        if self._asked is None:
            self._asked = Future()
            threading.Thread(target=self._answer, args=(self._asked,), name=f"{self._name} ready", daemon=True).start()
        asked = self._asked
        await asyncio.wait([asyncio.wrap_future(asked)], timeout=self._limit_s)
        if asked.done():
            self._asked = None
            self.is_ready = asked.result()
        else:
            self.is_ready = False

    def _answer(self, asked: Future[bool]) -> None:
        asked.set_result(self._ask())
