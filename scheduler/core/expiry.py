"""Times out sequences that have waited in the backlog for longer than their request allows.

Idle sequences are another matter: Redis times them by a key's TTL, see `expire.lua` and `LookForExpired`.
"""

from __future__ import annotations

from heapq import heappop, heappush

from scheduler.core.backlog import Entry
from scheduler.core.state import LeaderState, SequencePhase
from shared.contract.ids import SequenceId

TIMEOUT_MESSAGE = "timeout of the corresponding sequence has been expired"
"""source  Triton core, sequence batcher (triton-spec 1.7): UNAVAILABLE"""

COMPACT_SLACK = 64
"""Slack before the heap of deadlines is cleaned of sequences that do not wait any more, and of all but the earliest
deadline of each other one."""


def deadline_ms(entry: Entry, timeout_us: int) -> int:
    """When a waiting sequence times out: the time of its entry plus the timeout, rounded up to a ms."""
    return entry.ms + (timeout_us + 999) // 1000


def watch(state: LeaderState, sequence: SequenceId, entry: Entry, by_ms: int) -> None:
    """Remembers by when a waiting sequence must have its slot. Called again, the earliest time counts."""
    if len(state.timeouts) > 2 * len(state.sequences) + COMPACT_SLACK:
        latest_first = sorted(state.timeouts, reverse=True)
        earliest = {due[2]: due for due in latest_first if is_waiting(state, due[2], due[1])}
        # What is sorted is a heap.
        state.timeouts = sorted(earliest.values())
    heappush(state.timeouts, (by_ms, entry, sequence))


def overdue(state: LeaderState) -> list[SequenceId]:
    """The sequences whose deadline is not after `state.now_ms`, earliest first. Their deadlines are removed."""
    due: dict[SequenceId, None] = {}
    while state.timeouts and state.timeouts[0][0] <= state.now_ms:
        _, entry, sequence = heappop(state.timeouts)
        if is_waiting(state, sequence, entry):
            due[sequence] = None
    return list(due)


def is_waiting(state: LeaderState, sequence: SequenceId, entry: Entry) -> bool:
    """Whether the sequence still waits at that entry for its first slot. One that has had a slot never times out."""
    known = state.sequences.get(sequence)
    return known is not None and known.entry == entry and known.phase is SequencePhase.WAITING
