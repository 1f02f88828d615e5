"""Limits repeated log lines: a line is written once, and then with a count, at intervals that double."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

FIRST_INTERVAL_S = 2.0
LONGEST_INTERVAL_S = 60.0
"""A line that has not come for so long counts as new again."""
KNOWN_MAX = 512
"""Different lines that are remembered; the ones that have not come for longest are forgotten first."""


@dataclass(slots=True)
class RepeatedLine:
    """One line that was written. suppressed: how often it has come since"""

    seen_s: float
    due_s: float
    interval_s: float = FIRST_INTERVAL_S
    suppressed: int = 0


class Repeats:
    """Decides which lines are written. clock: seconds; `time.monotonic` by default

    Any thread may ask. Two that ask for the same line at once may both be told to write it: there is no lock, which a
    process that a model forks could inherit taken.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        # Looked up now: the simulation has another one by then than when this module was read.
        self._clock = clock or time.monotonic
        self._told: dict[Hashable, RepeatedLine] = {}

    def suppressed(self, what: Hashable) -> int | None:
        """How often the line was held back since it was last written; None: it is held back this time too."""
        now_s = self._clock()
        told = self._told.pop(what, None)
        if told is None or now_s - told.seen_s > LONGEST_INTERVAL_S:
            self._told[what] = RepeatedLine(now_s, now_s + FIRST_INTERVAL_S)
            # A copy, which no other thread changes meanwhile.
            for oldest in list(self._told)[:-KNOWN_MAX] if len(self._told) > KNOWN_MAX else ():
                self._told.pop(oldest, None)
            return told.suppressed if told else 0
        # Put in again at the end of the dict: the first entry is the one that has not come for longest.
        self._told[what] = told
        told.seen_s = now_s
        if now_s < told.due_s:
            told.suppressed += 1
            return None
        suppressed, told.suppressed = told.suppressed, 0
        told.interval_s = min(LONGEST_INTERVAL_S, 2 * told.interval_s)
        told.due_s = now_s + told.interval_s
        return suppressed
