"""How long a batch should wait for sequences that are about to come back.

Callers that wait for their answers send the next step soon after it. If a batch begins as soon as any step is ready,
sequences fall into groups that take turns, and every batch stays part-filled: while one group computes, the steps of
the other come in just too late. So an instance learns how long its batches take, e, which depends on their rows, and
how soon sequences come back after their batch. With k steps ready and m more expected within w, it waits while
(k + m) / (e + w) is more, by a margin, than what is to be had without waiting: k / e, or n / 2e where groups of n
sequences in all take turns.

A sequence that ended is expected back as its successor: the slot that it leaves is given to a sequence from the
backlog, if there is one.

Pure: the caller brings the time. A sequence alone never waits, because nobody else is expected. No batch waits longer
than a share of e.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add

import msgspec

from shared.contract.ids import SequenceId
from shared.contract.model_config import Direct, ModelConfig, Oldest

HOLD_SHARE_MAX = 0.8
"""Longest wait for a batch, as a share of the time that a batch takes."""
MARGIN = 1.05
"""A wait must promise this many times the throughput."""
BATCH_US_MIN = 1_000
"""Batches that take less are not held: an event loop cannot wait so exactly, and nothing would be saved."""
BATCHES = 32
"""Latest batches whose times are remembered."""
RETURNS = 64
"""Latest returns that are remembered."""
WAITS = 8
"""Waits of different lengths that are compared."""
AWAY_BATCHES = 16
"""Batches whose sequences are remembered as away, or ended. While batches are full, nobody asks who is late."""
NEVER = 1 << 62
ASSUMED_US = (2_000, 5_000, 10_000)
"""Returns that are assumed until there are others."""


class Returns:
    """How soon something comes back: its latest returns, as they were. Mean and spread would not do: the long tail of a
    busy machine would forbid every wait.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(ASSUMED_US)
        self._sorted: list[int] = sorted(ASSUMED_US)

    def learn(self, took_us: int) -> None:
        """Something came back after that time."""
        if len(self._latest) == RETURNS:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(took_us)
        insort(self._sorted, took_us)

    def expected(self, left_us: Iterable[int], waits_us: Sequence[int], now_us: int) -> list[float]:
        """How many of those that left at these times come back within each wait: for each of them, the share of the
        returns that took longer than it has been away.
        """
        latest, expected = self._sorted, [0.0] * len(waits_us)
        # Those of one batch left together.
        for left, together in Counter(left_us).items():
            age_us = now_us - left
            before = bisect_right(latest, age_us)
            if before == len(latest):
                continue
            share = together / (len(latest) - before)
            for at, wait_us in enumerate(waits_us):
                expected[at] += (bisect_right(latest, age_us + wait_us, before) - before) * share
        return expected


class Line(msgspec.Struct, frozen=True):
    """Microseconds of a batch: `fixed_us`, and `row_us` for each of its rows. usual_us: the median of all"""

    usual_us: float = 0.0
    fixed_us: float = 0.0
    row_us: float = 0.0


def line_through(batches: Collection[tuple[int, int]]) -> Line:
    """A line through the medians of smaller and larger batches, given by their rows and times. Medians, because one
    batch that compiles a kernel takes a thousand times as long as the others.
    """
    if len(batches) < 2:
        # The first batch may be the one that compiles: it tells nothing alone.
        return Line()
    mean, usual_us = _middle(batches)
    if small := [batch for batch in batches if batch[0] < mean]:
        few, few_us = _middle(small)
        many, many_us = _middle([batch for batch in batches if batch[0] >= mean])
        if many_us > few_us:
            # Not steeper than in proportion to the rows: no batch takes less than nothing.
            row_us = min((many_us - few_us) / (many - few), many_us / many)
            return Line(usual_us, many_us - row_us * many, row_us)
    return Line(usual_us, usual_us)


class BatchTimes:
    """How long a batch takes, by its rows, as the latest ones tell."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=BATCHES)
        self._line: Line | None = None

    def learn(self, rows: int, took_us: int) -> None:
        """A batch of so many rows has ended."""
        self._latest.append((rows, took_us))
        # Fitted when somebody asks: batches of a fast model are never held.
        self._line = None

    def _fitted(self) -> Line:
        if self._line is None:
            self._line = line_through(self._latest)
        return self._line

    @property
    def are_long(self) -> bool:
        """Whether batches take long enough to be held. A short one answers that alone."""
        return bool(self._latest) and self._latest[-1][1] >= BATCH_US_MIN <= self.usual_us

    @property
    def usual_us(self) -> float:
        """Median of all; 0.0 before the second batch."""
        return self._fitted().usual_us

    def of(self, rows: float) -> float:
        """Microseconds that a batch of so many rows takes."""
        line = self._fitted()
        return line.fixed_us + line.row_us * rows


def _middle(batches: Collection[tuple[int, int]]) -> tuple[float, float]:
    """Mean number of rows, and median time: of two, the shorter one."""
    rows, times_us = zip(*batches, strict=True)
    return sum(rows) / len(rows), sorted(times_us)[(len(rows) - 1) // 2]


class Hold(msgspec.Struct, frozen=True):
    """A batch that waits for more rows. rows: when it began to wait"""

    since_us: int
    rows: int


def gathers(config: ModelConfig) -> bool:
    """Whether batches of a model are gathered: not against a delay, a preferred size or a slot utilization that its
    configuration gives, and not if the parameter `batch_gathering` says no.
    """
    if config.sequence_batching is None or config.max_batch_size < 2 or not config.batch_gathering:
        return False
    match config.sequence_batching.strategy:
        case Direct(max_queue_delay_us=delay, minimum_slot_utilization=utilization):
            return not (delay or utilization)
        case Oldest(max_queue_delay_us=delay, preferred_batch_sizes=preferred):
            return not delay and set(preferred) <= {config.max_batch_size}


@dataclass(slots=True)
class Gathering:
    """What one instance has learned, and whom it expects.

    rows      most rows of a batch
    times     how long its batches take
    away      sequences that were answered and have no step here since: when their batch ended; in this order
    ended     when sequences ended that have had no successor since; of very many, the latest
    hold      set while a batch waits
    free_us   when the last batch ended
    """

    rows: int
    times: BatchTimes = field(default_factory=BatchTimes)
    away: OrderedDict[SequenceId, int] = field(default_factory=OrderedDict[SequenceId, int])
    ended: deque[int] = field(init=False)
    returns: Returns = field(default_factory=Returns)
    successions: Returns = field(default_factory=Returns)
    hold: Hold | None = None
    free_us: int = 0

    def __post_init__(self) -> None:
        self.ended = deque(maxlen=AWAY_BATCHES * self.rows)

    def ran(self, rows: int, began_us: int, now_us: int) -> None:
        """Learns from a batch that has ended how long one takes. A staged batch ran only after the one before it."""
        self.times.learn(rows, now_us - max(began_us, self.free_us))
        self.free_us = now_us

    def left(self, sequence: SequenceId, now_us: int) -> None:
        """A step of a sequence is answered, and there is none behind it. Of very many, the latest are remembered."""
        self.away[sequence] = now_us
        if len(self.away) > AWAY_BATCHES * self.rows:
            self.away.popitem(last=False)

    def came(self, sequence: SequenceId, now_us: int) -> None:
        """A step of a sequence has come that was here before."""
        left_us = self.away.pop(sequence, None)
        if left_us is not None:
            self.returns.learn(now_us - left_us)

    def began(self, now_us: int) -> None:
        """A sequence has come that was not here before."""
        if self.ended:
            self.successions.learn(now_us - self.ended.popleft())

    def wait_until(self, ready: int, now_us: int) -> int | None:
        """Until when a batch of so many rows should wait for more; None if it should run."""
        if ready >= self.rows or not self.times.are_long:
            return None
        wait_us = self._best_wait(ready, now_us)
        if wait_us == 0:
            return None
        if self.hold is None:
            self.hold = Hold(now_us, ready)
        return now_us + wait_us

    def begun(self, rows: int) -> int | None:
        """A batch of so many rows begins. Returns how many it has gained by waiting, where not more of them have left
        meanwhile; None if it did not wait.
        """
        hold, self.hold = self.hold, None
        return max(0, rows - hold.rows) if hold is not None else None

    def _best_wait(self, ready: int, now_us: int) -> int:
        """The wait after which the batch is expected to have run the most rows for its time; 0 for none."""
        self._forget_late(now_us)
        since_us = self.hold.since_us if self.hold is not None else now_us
        longest_us = since_us + HOLD_SHARE_MAX * self.times.of(ready) - now_us
        if longest_us < 1 or not (self.away or self.ended):
            return 0
        waits_us = [int(longest_us * part / WAITS) for part in range(1, WAITS + 1)]
        *within, ever = self._expected([*waits_us, int(self.times.usual_us)], now_us)
        in_turns = min(ready + ever, 2 * self.rows) / 2
        best, best_us = MARGIN * max(self._rate(ready), self._rate(in_turns)), 0
        for wait_us, expected in zip(waits_us, within, strict=True):
            rate = self._rate(ready + min(self.rows - ready, expected), wait_us)
            if rate > best:
                best, best_us = rate, wait_us
        return best_us

    def _rate(self, rows: float, wait_us: int = 0) -> float:
        """Rows for each microsecond of a batch, and of the wait before it."""
        return rows / (wait_us + self.times.of(rows))

    def _expected(self, waits_us: Sequence[int], now_us: int) -> Iterable[float]:
        """How many sequences will have come after each wait."""
        back = self.returns.expected(islice(self.away.values(), self.rows), waits_us, now_us)
        successors = self.successions.expected(islice(self.ended, self.rows), waits_us, now_us)
        return map(add, back, successors)

    def _forget_late(self, now_us: int) -> None:
        """What has not come back within the time of a batch is not expected any more."""
        oldest_us = now_us - self.times.usual_us
        while self.away and self.away[next(iter(self.away))] < oldest_us:
            self.away.popitem(last=False)
            self.returns.learn(NEVER)
        while self.ended and self.ended[0] < oldest_us:
            self.ended.popleft()
            self.successions.learn(NEVER)
