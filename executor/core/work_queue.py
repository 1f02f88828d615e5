"""Stateless requests in the order in which they may run: priorities, queue policies, timeouts (triton-spec 3.1-3.3).

Pure. Levels are 1 .. priority_levels, lower first; a model without levels has one queue, level 0. Inside a level: first
in, first out; requests that waited too long under the DELAY action come after the level's others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from shared.messages import InferMessage
from shared.model_config.values import DynamicBatching, QueuePolicy, TimeoutAction


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRequest:
    """A stateless request that waits. Satisfies `batching.Queued`.

    stream, entry   where it lies in Redis until it is answered
    deadline_us     when the queue's policy gives it up; None: never
    """

    stream: str
    entry: str
    gateway: str
    token: str
    message: InferMessage
    queued_us: int
    shape_key: Hashable
    rows: int
    deadline_us: int | None


@dataclass(slots=True)
class _Level:
    policy: QueuePolicy
    waiting: deque[QueuedRequest] = field(default_factory=deque[QueuedRequest])
    delayed: deque[QueuedRequest] = field(default_factory=deque[QueuedRequest])


def policy_of(batching: DynamicBatching, level: int) -> QueuePolicy:
    """The rules of one priority level."""
    return batching.priority_queue_policies.get(level, batching.default_queue_policy)


def effective_level(batching: DynamicBatching, priority: int) -> int:
    """The level that a request's priority means: out of range is the default, silently, as in Triton."""
    if batching.priority_levels == 0:
        return 0
    return priority if 1 <= priority <= batching.priority_levels else batching.default_priority_level


def deadline_us(policy: QueuePolicy, *, timeout_us: int, queued_us: int) -> int | None:
    """When a request is given up. A request may only lower its queue's timeout (triton-spec 3.3)."""
    limit = policy.default_timeout_us
    if policy.allow_timeout_override and 0 < timeout_us < limit:
        limit = timeout_us
    return queued_us + limit if limit else None


class WorkQueue:
    """Waiting requests of one stateless model version."""

    def __init__(self, batching: DynamicBatching) -> None:
        levels = range(1, batching.priority_levels + 1) if batching.priority_levels else range(1)
        self._levels = {level: _Level(policy_of(batching, level)) for level in levels}

    def __len__(self) -> int:
        return sum(len(level.waiting) + len(level.delayed) for level in self._levels.values())

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In the order in which they may run."""
        for level in self._levels.values():
            yield from level.waiting
            yield from level.delayed

    @property
    def rows(self) -> int:
        """Rows of all waiting requests."""
        return sum(request.rows for request in self)

    def add(self, request: QueuedRequest, level: int) -> None:
        """Appends a request to its level."""
        self._levels[level].waiting.append(request)

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Applies the policies' timeouts: takes out and returns the rejected, moves the delayed back."""
        rejected: list[QueuedRequest] = []
        for level in self._levels.values():
            late = [r for r in level.waiting if r.deadline_us is not None and r.deadline_us <= now_us]
            if not late:
                continue
            level.waiting = deque(r for r in level.waiting if r not in late)
            if level.policy.timeout_action is TimeoutAction.DELAY:
                level.delayed.extend(late)
            else:
                rejected.extend(late)
        return rejected

    def next_deadline_us(self) -> int | None:
        """When `expire` has something to do at the latest."""
        deadlines = [r.deadline_us for level in self._levels.values() for r in level.waiting if r.deadline_us]
        return min(deadlines, default=None)

    def take(self, count: int) -> list[QueuedRequest]:
        """Takes the first `count` requests out."""
        taken: list[QueuedRequest] = []
        for level in self._levels.values():
            for queue in (level.waiting, level.delayed):
                while queue and len(taken) < count:
                    taken.append(queue.popleft())
        return taken
