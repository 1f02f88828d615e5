"""Shares the event loop among connections that have more to do than fits in one turn of it, each or all together."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

TURN_S = 0.002
"""How long a connection may take at a time. Handling a frame takes some 10 us, the dearest one some milliseconds."""
ENTERING_MAX, ENTERING_S = 128, 0.008
"""How many connections begin with what has come for them before the next one waits for another turn, and how long all
of them may take. Of most, the work that follows takes some tenths of a millisecond."""
PAUSE_S = 0.05
"""After such a pause another turn has begun, for all that is of use here: nobody counts turns for it."""


class LoopTurns:
    """The connections of a port that have something to do.

    Of those that have something left to do, one goes on in each turn of the event loop, so that any number of them
    takes from all others as much as one does. Of those for which something has come, some begin with it. The others
    wait, and their clients take turns: one with thousands of connections does not keep another one waiting.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], object]] = deque()
        self._number = 0
        self._is_counting = False
        self._room, self._until = 0, -math.inf
        """How many more may begin at once, and until when."""
        self._entering: OrderedDict[str, list[tuple[int, Callable[[], object]]]] = OrderedDict()
        """Those that wait to begin, by client, each client's as a heap by when they came. The client whose turn it is
        comes first."""
        self._arrivals = count()

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

    def enter(self, client: str, begin: Callable[[], object]) -> None:
        """Something has come for a connection of this client: calls `begin`, at once or in a later turn of the loop."""
        if self._enters():
            begin()
        else:
            self._line_up(client, next(self._arrivals), begin)

    async def entered(self, client: str) -> None:
        """Returns when `enter` calls, in a turn of the loop that has time for what follows."""
        if self._enters():
            return
        arrival = next(self._arrivals)
        while True:
            come = self._loop.create_future()
            self._line_up(client, arrival, partial(self._wake, come))
            await come
            now = self._loop.time()
            self._until = min(self._until, now + ENTERING_S)
            if now < self._until:
                return

    def _line_up(self, client: str, arrival: int, begin: Callable[[], object]) -> None:
        if not self._entering:
            self._loop.call_soon(self._let_enter)
        heappush(self._entering.setdefault(client, []), (arrival, begin))

    def _wake(self, come: asyncio.Future[None]) -> None:
        """One that waits in `entered` may go on: all that are woken do so one after the other, in the next turn."""
        if not come.done():
            self._until = math.inf  # Their time counts from the first of them, who always has some.
            come.set_result(None)

    def _enters(self) -> bool:
        """Whether one more may begin at once. It counts then."""
        now = self._loop.time()
        if self._entering or self._until == math.inf:
            return False
        if now >= self._until + PAUSE_S:
            self._room, self._until = ENTERING_MAX, now + ENTERING_S
        if not self._room or now >= self._until:
            return False
        self._room -= 1
        return True

    def _let_enter(self) -> None:
        """Another turn has begun."""
        self._room, self._until = ENTERING_MAX, self._loop.time() + ENTERING_S
        try:
            while self._entering and self._room and self._loop.time() < self._until:
                client, waiting = self._entering.popitem(last=False)
                _, begin = heappop(waiting)
                if waiting:
                    self._entering[client] = waiting
                self._room -= 1
                begin()
        finally:
            if self._entering:
                self._loop.call_soon(self._let_enter)

    def _count(self) -> None:
        self._is_counting = False
        self._number += 1

    def _next(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            self._loop.call_soon(self._next)
        go_on()
