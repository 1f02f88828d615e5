"""Stateless requests: priorities, policies, timeouts."""

from __future__ import annotations

import pytest

from executor.core.work_queue import QueuedRequest, WorkQueue, deadline_us, effective_level
from shared.messages import InferMessage
from shared.model_config.values import DynamicBatching, QueuePolicy, TimeoutAction

MESSAGE = InferMessage("m", "1", "", 0, ())


def request(name: str, deadline: int | None = None) -> QueuedRequest:
    return QueuedRequest("stream", name, "g", name, MESSAGE, 0, None, 1, deadline)


def names(queue: WorkQueue) -> list[str]:
    return [item.entry for item in queue]


def test_lower_levels_run_first_and_inside_a_level_first_in_first_out() -> None:
    queue = WorkQueue(DynamicBatching(priority_levels=2, default_priority_level=2))
    for name, level in (("a", 2), ("b", 1), ("c", 2), ("d", 1)):
        queue.add(request(name), level)

    assert ["b", "d", "a", "c"] == names(queue)
    assert ["b", "d", "a"] == [item.entry for item in queue.take(3)]
    assert ["c"] == names(queue)


@pytest.mark.parametrize(("priority", "level"), [(1, 1), (3, 3), (0, 2), (4, 2)])
def test_a_priority_out_of_range_means_the_default_level(priority: int, level: int) -> None:
    assert level == effective_level(DynamicBatching(priority_levels=3, default_priority_level=2), priority)


@pytest.mark.parametrize(
    ("default", "override", "timeout", "deadline"),
    [
        (0, False, 0, None),
        (100, False, 0, 110),
        (100, False, 50, 110),
        (100, True, 50, 60),
        (100, True, 500, 110),
        # Triton compares with the default, and no timeout is less than a default of 0.
        (0, True, 50, None),
    ],
)
def test_a_request_may_only_lower_its_queues_timeout(
    default: int, override: bool, timeout: int, deadline: int | None
) -> None:
    policy = QueuePolicy(default_timeout_us=default, allow_timeout_override=override)

    assert deadline == deadline_us(policy, timeout_us=timeout, queued_us=10)


def test_reject_takes_the_late_out() -> None:
    queue = WorkQueue(DynamicBatching())
    queue.add(request("late", 50), 0)
    queue.add(request("early", 90), 0)

    assert 50 == queue.next_deadline_us()
    assert ["late"] == [item.entry for item in queue.expire(50)]
    assert ["early"] == names(queue)


def test_delay_puts_the_late_behind_the_others_of_their_level_and_never_again() -> None:
    delay = QueuePolicy(timeout_action=TimeoutAction.DELAY)
    queue = WorkQueue(DynamicBatching(priority_levels=2, default_priority_level=1, priority_queue_policies={1: delay}))
    queue.add(request("late", 50), 1)
    queue.add(request("other"), 1)
    queue.add(request("low"), 2)

    assert [] == queue.expire(60)
    assert ["other", "late", "low"] == names(queue)
    assert [] == queue.expire(1000)
    assert 3 == queue.rows
