"""How often slots of a version have become free lately, while none was free: by that rate a waiting line moves.

Only the time in which every slot is taken counts. With free slots fewer sequences run, so fewer end.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

KEPT = 64
"""Freed slots that are remembered: enough for a rate within a quarter, few enough to follow a change."""
WINDOW_MS = 600_000
"""Longest time that counts, in which all slots were taken."""


class FreedSlots:
    """The freed slots of one version. Times here are those of a clock that stands still while a slot is free."""

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=KEPT)
        self._passed_ms = 0
        self._full_since_ms: int | None = None

    def taken(self, now_ms: int, *, all_taken: bool) -> None:
        """Whether every slot is taken from now on."""
        if all_taken and self._full_since_ms is None:
            self._full_since_ms = now_ms
        elif not all_taken and self._full_since_ms is not None:
            self._passed_ms, self._full_since_ms = self._clock_ms(now_ms), None

    def freed(self, now_ms: int) -> None:
        """Notes that a slot has become free, which counts while none was."""
        if self._full_since_ms is not None:
            self._times.append(self._clock_ms(now_ms))

    def seen(self, now_ms: int) -> tuple[int, int, float]:
        """For how long no slot was free (ms), how many became free meanwhile, and how unevenly (`LineForecast`)."""
        now, times, begin = self._clock_ms(now_ms), list(self._times), 0
        if len(times) == KEPT:
            # Those before the oldest one are forgotten: time counts from there.
            begin = times.pop(0)
        if begin < now - WINDOW_MS:
            begin = now - WINDOW_MS
            times = [time for time in times if time > begin]
        return now - begin, len(times), _spread([later - time for time, later in pairwise(times)])

    def _clock_ms(self, now_ms: int) -> int:
        since = self._full_since_ms
        return self._passed_ms + (max(0, now_ms - since) if since is not None else 0)


def _spread(gaps: list[int]) -> float:
    total = sum(gaps)
    if not total:
        return max(1.0, float(len(gaps)))
    return max(1.0, len(gaps) * sum(gap * gap for gap in gaps) / (total * total) - 1)
