"""Runs an `async def execute`, as Triton does: on an event loop of the instance's own, which stays between batches.

So what a model binds to its loop in one batch, such as a client with open connections, it finds again in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Coroutines:
    """The loop of one instance; made when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Its result, or what it raises. Runs on the calling thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Ends what the model has left running on the loop."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
