"""How long a batch should wait for sequences that are about to come back.

Callers that wait for their answers send the next step soon after it. If a batch begins as soon as any step is ready,
sequences fall into groups that take turns, and every batch stays part-filled: while one group computes, the steps of
the other come in just too late. So an instance learns how long its batches take, e, and how soon sequences come back
after their batch. With k steps ready and m more expected within w, it waits while that raises the throughput:
(k + m) / (e + w) > k / e, by a margin.

Pure: the caller brings the time. A sequence alone never waits, because nobody else is expected. No batch waits longer
than a share of e.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

import msgspec

from shared.contract.ids import SequenceId
from shared.contract.model_config import Direct, ModelConfig, Oldest

HOLD_SHARE_MAX = 0.5
"""Longest wait for a batch, as a share of the time that a batch takes."""
MARGIN = 1.1
"""A wait must promise this many times the throughput."""
WEIGHT = 0.1
"""Of the latest batch in the time that a batch takes."""
RETURNS = 64
"""Latest returns that are remembered."""
WAITS = 8
"""Waits of different lengths that are compared."""
NEVER = 1 << 62


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
    batch_us  how long a batch takes; 0.0 before the first
    away      sequences that were answered and have no step here since: when their batch ended; in this order
    hold      set while a batch waits
    """

    rows: int
    batch_us: float = 0.0
    away: dict[SequenceId, int] = field(default_factory=dict[SequenceId, int])
    hold: Hold | None = None
    _returns: deque[int] = field(default_factory=deque[int])
    _sorted: list[int] = field(default_factory=list[int])

    def ran(self, took_us: int) -> None:
        """A batch has ended."""
        self.batch_us += (took_us - self.batch_us) * (WEIGHT if self.batch_us else 1.0)

    def left(self, sequence: SequenceId, now_us: int) -> None:
        """A sequence was answered, and its next step is not here."""
        self.away[sequence] = now_us

    def came(self, sequence: SequenceId, now_us: int) -> None:
        """A step has come."""
        left_us = self.away.pop(sequence, None)
        if left_us is not None:
            self.learn(now_us - left_us)

    def learn(self, took_us: int) -> None:
        """Remembers how long a sequence was away."""
        if len(self._returns) == RETURNS:
            self._sorted.remove(self._returns.popleft())
        self._returns.append(took_us)
        insort(self._sorted, took_us)

    def wait_until(self, ready: int, now_us: int) -> int | None:
        """Until when a batch of so many rows should wait for more; None if it should run."""
        if ready >= self.rows or not self._returns:
            return None
        wait_us = self._best_wait(ready, now_us)
        if wait_us == 0:
            return None
        if self.hold is None:
            self.hold = Hold(now_us, ready)
        return now_us + wait_us

    def begun(self, rows: int) -> int | None:
        """A batch of so many rows begins. Returns how many it has gained by waiting; None if it did not wait."""
        hold, self.hold = self.hold, None
        return rows - hold.rows if hold is not None else None

    def _best_wait(self, ready: int, now_us: int) -> int:
        """The wait after which the batch is expected to have run the most rows for its time; 0 for none."""
        self._forget_late(now_us)
        ages_us = [now_us - left_us for left_us in self.away.values()]
        since_us = self.hold.since_us if self.hold is not None else now_us
        longest_us = since_us + HOLD_SHARE_MAX * self.batch_us - now_us
        best, best_us = MARGIN * ready / max(1.0, self.batch_us), 0
        for part in range(1, WAITS + 1) if ages_us and longest_us >= 1 else ():
            wait_us = int(longest_us * part / WAITS)
            expected = min(self.rows - ready, sum(self._chance(age_us, wait_us) for age_us in ages_us))
            rate = (ready + expected) / (self.batch_us + wait_us)
            if rate > best:
                best, best_us = rate, wait_us
        return best_us

    def _chance(self, age_us: int, wait_us: int) -> float:
        """The share of the sequences away for that long that come back within the wait."""
        before, by_then = bisect_right(self._sorted, age_us), bisect_right(self._sorted, age_us + wait_us)
        left = len(self._sorted) - before
        return (by_then - before) / left if left else 0.0

    def _forget_late(self, now_us: int) -> None:
        """Sequences that have not come back within the time of a batch are not expected any more."""
        while self.away:
            sequence, left_us = next(iter(self.away.items()))
            if now_us - left_us <= self.batch_us:
                return
            del self.away[sequence]
            self.learn(NEVER)
