"""Calls into models that do not return.

A thread cannot be stopped from outside, so a process whose model hangs can only end. Its lease is given up first, so
that other executors take over at once. The step or request that hangs counts as what its executor was lost with, which
bounds how often it is tried (`LOST_OWNERS_MAX`, `LOST_EXECUTORS_MAX`).

Time is counted in looks, not by a clock: while the process itself was frozen, it did not wait for its model.
An instance that waits for another model's answer has not hung: that call has a deadline of its own.
A call that keeps the interpreter's lock, or runs on the event loop, stops the looks as well. Then a timer of the C
library, which needs no interpreter, ends the process; the lease has ended by itself, because nobody could renew it.
That timer alone goes by a clock: it also ends a process that was frozen for so long.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import sys
import traceback
from collections.abc import Callable, Iterable

from executor.engine.python.calls import waits
from executor.workers.worker import EngineCall, EngineWorker

LOOKS_PER_LIMIT = 8
LOOK_INTERVAL_MAX_S = 1.0
HELD_UP_LIMITS = 2
"""After so many limits without a single look, the process ends."""
STANDARD_ERROR = 2
"""Its descriptor, because a model may put something else in the place of `sys.stderr` (`redirect_stderr`)."""


class HungCallError(Exception):
    """A call into a model has not returned."""


class HungCalls:
    """Counts how many looks in a row have seen the same call. Pure. looks_max: a call seen more often has hung"""

    def __init__(self, looks_max: int) -> None:
        self._looks_max = looks_max
        self._looks: dict[EngineCall, int] = {}

    def look(self, running: Iterable[EngineCall]) -> EngineCall | None:
        """Takes in the calls that run now; returns a call that has hung."""
        self._looks = {call: self._looks.get(call, 0) + 1 for call in running}
        return next((call for call, looks in self._looks.items() if looks > self._looks_max), None)


async def watch(workers: Callable[[], Iterable[EngineWorker]], limit_s: float) -> EngineCall:
    """Returns when a call of one of the workers has run for longer than the limit."""
    interval_s = min(limit_s / LOOKS_PER_LIMIT, LOOK_INTERVAL_MAX_S)
    hung = HungCalls(math.ceil(limit_s / interval_s))
    try:
        while True:
            # Each look starts the timer again; it fires only if no look comes for so long.
            faulthandler.dump_traceback_later(HELD_UP_LIMITS * limit_s, exit=True, file=STANDARD_ERROR)
            waiting = {wait.thread for wait in waits()}
            running = (call for worker in workers() if (call := worker.running) is not None)
            call = hung.look(call for call in running if call.thread not in waiting)
            if call is not None:
                return call
            await asyncio.sleep(interval_s)
    finally:
        faulthandler.cancel_dump_traceback_later()


def place_of(call: EngineCall) -> str:
    """Where in its code a call is now: `file:line in function`."""
    # Documented, for exactly this.
    frame = sys._current_frames().get(call.thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "unknown"
    innermost = traceback.extract_stack(frame, limit=1)[0]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"
