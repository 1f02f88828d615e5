"""How often Python's collector of cyclic garbage looks through a service's memory.

Most of a service's memory stays until the process ends: modules, classes, tables. When enough that is newer has lasted
for a while, the collector looks through all of it, and everybody waits: a gateway under load for 25 to 45 ms, twice in
five seconds.

Not for a process that runs the code of models: what a model leaves when it is unloaded may be large, and in circles. It
looks through its memory when a model is gone (`Collector`).

Source: the documentation of Python's module `gc`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Generator
from contextlib import contextmanager

YOUNG_MAX = 10_000
"""New objects that may be alive before the collector looks at them. By default it is 700: fewer than the requests of
one turn of a busy event loop have, which are gone in the next turn without a collector."""
REST = 19
"""How many times as long as a look through all memory the pause behind it is."""


def leave_what_stays() -> None:
    """What there is now is not looked at any more. Called when a service has started."""
    gc.collect()
    gc.freeze()


def look_seldom() -> None:
    """Lets more objects be alive before the collector looks at the new ones."""
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])


@contextmanager
def at_rest() -> Generator[None]:
    """Within the block the collector looks at nothing. For what makes very many objects and no circles: it would look
    through all of them again and again, while no other thread runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Collector:
    """Looks through all memory when something is gone that may have left much, in circles. Everybody waits meanwhile:
    for 290 ms where a thousand models are loaded. So it is never more than a twentieth of the time, however often it is
    asked: those who ask during the pause share the next look.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._from_s = 0.0

    def look_soon(self) -> None:
        """In a later turn of the event loop, so that the caller's own frame keeps nothing."""
        if not self._is_due:
            self._is_due, loop, pause_s = True, asyncio.get_running_loop(), self._from_s - time.monotonic()
            if pause_s > 0:
                loop.call_later(pause_s, self._look)
            else:
                loop.call_soon(self._look)

    def _look(self) -> None:
        began_s = time.monotonic()
        gc.collect()
        now_s = time.monotonic()
        self._is_due, self._from_s = False, now_s + REST * (now_s - began_s)
