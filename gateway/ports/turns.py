"""Shares the event loop among connections that have more to do than fits in one turn of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.002
"""How long a connection may take at a time. Handling a frame takes some 10 us, the dearest one some milliseconds."""


class LoopTurns:
    """The connections of a port that have something left to do. In each turn of the event loop one of them goes on, so
    that any number of them takes from all others as much as one does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], object]] = deque()
        self._number = 0
        self._is_counting = False

    @property
    def number(self) -> int:
        """Another one in each turn of the loop, in which a transport may deliver many times what it reads at once."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._count)
        return self._number

    def wait(self, go_on: Callable[[], object]) -> None:
        """Calls `go_on` in a later turn of the loop. It takes no longer than TURN_S."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    async def turn(self) -> None:
        """Returns in a later turn of the loop, as `wait` calls."""
        come = self._loop.create_future()
        self.wait(lambda: come.done() or come.set_result(None))
        await come

    def _count(self) -> None:
        self._is_counting = False
        self._number += 1

    def _next(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._loop.call_soon(self._next)
        go_on()
