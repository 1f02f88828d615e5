"""The dynamic batcher beside a naive one that follows Triton's rule by enumeration (triton-spec 3.2), over any queue.

The reference keeps a list of every batch that could be made of the queue's front and picks from the finished list, by
the sentences of the rule; it shares no code and no running totals with what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from executor.core.batching import Wait
from executor.core.dynamic_batcher import BatchRules
from shared.contract.model_config import DynamicBatching, ModelConfig


@dataclass(frozen=True)
class Request:
    """A waiting request. welcome: what a batch strategy says of it."""

    queued_us: int = 0
    shape_key: str = "a"
    rows: int = 1
    welcome: bool = True


def reference(
    queue: Sequence[Request],
    *,
    limit: int,
    preferred: Sequence[int],
    delay: int,
    now: int,
    deadline: int | None,
    was_busy: bool,
    strategy: bool,
) -> int | Wait:
    """Triton's dynamic batcher, sentence by sentence."""
    if not queue:
        return Wait(None if deadline is None else now + deadline)

    def rows(members: int) -> int:
        return sum(request.rows for request in queue[:members])

    def joins(index: int) -> bool:
        alike = queue[index].shape_key == queue[0].shape_key
        return rows(index + 1) <= limit and alike and (queue[index].welcome or not strategy)

    fits = 1
    while fits < len(queue) and joins(fits):
        fits += 1
    closed = fits < len(queue)
    sizes = sorted(preferred) or [limit]

    # The largest preferred size that was reached; before any, what is there when the next would exceed all of them.
    candidates = [members for members in range(1, fits + 1) if rows(members) in sizes]
    if not candidates:
        # The size of the next is looked at before its shape.
        candidates = [
            members for members in range(1, fits + 1) if members < len(queue) and rows(members + 1) > sizes[-1]
        ][:1]
    oldest_is_late = delay > 0 and now - queue[0].queued_us >= delay
    cannot_grow = closed or rows(fits) >= sizes[-1]
    if oldest_is_late or (was_busy and delay > 0 and cannot_grow):
        return fits
    if candidates:
        return candidates[-1]
    if delay == 0 or cannot_grow:
        return fits
    return Wait(min(queue[0].queued_us + delay, now + deadline if deadline is not None else now + delay + 1000))


requests = st.builds(
    Request,
    queued_us=st.integers(0, 60),
    shape_key=st.sampled_from("aaab"),
    rows=st.sampled_from([1, 1, 1, 2, 3, 5]),
    welcome=st.sampled_from([True, True, True, False]),
)


def rules(limit: int, preferred: Sequence[int], delay: int) -> BatchRules:
    return BatchRules.of(
        ModelConfig(
            "m",
            "python",
            "",
            limit,
            (),
            (),
            dynamic_batching=DynamicBatching(tuple(preferred), max_queue_delay_us=delay),
        )
    )


@given(
    queue=st.lists(requests, max_size=12).map(lambda items: sorted(items, key=lambda item: item.queued_us)),
    limit=st.integers(1, 8),
    sizes=st.sets(st.integers(1, 8), max_size=3),
    delay=st.sampled_from([0, 0, 1, 30, 100]),
    now=st.integers(60, 160),
    deadline=st.none() | st.integers(0, 50),
    was_busy=st.booleans(),
    strategy=st.booleans(),
)
@example([Request(rows=3), Request(rows=2)], 8, {4}, 100, 60, None, False, False)
@example([Request(rows=5), Request()], 8, {4}, 100, 60, None, False, False)
@example([Request()] * 6, 8, {4, 8}, 0, 60, None, False, False)
@example([Request()] * 3, 8, {2}, 0, 60, None, True, False)
@example([Request()] * 3, 8, {2}, 100, 60, None, True, False)
@example([Request(rows=9)], 8, set[int](), 100, 60, None, False, False)
def test_decides_as_tritons_rule_says(
    queue: list[Request],
    limit: int,
    sizes: set[int],
    delay: int,
    now: int,
    deadline: int | None,
    was_busy: bool,
    strategy: bool,
) -> None:
    preferred = sorted(size for size in sizes if size <= limit)
    include: Callable[[Request], bool] | None = (lambda request: request.welcome) if strategy else None

    decision = rules(limit, preferred, delay).decide(
        queue, now_us=now, deadline_us=deadline, was_busy=was_busy, include=include
    )

    assert decision == reference(
        queue,
        limit=limit,
        preferred=preferred,
        delay=delay,
        now=now,
        deadline=deadline,
        was_busy=was_busy,
        strategy=strategy,
    )


@given(queue=st.lists(requests, min_size=1, max_size=12), limit=st.integers(1, 8), sizes=st.sets(st.integers(1, 8)))
def test_what_is_taken_without_a_decision_is_what_would_be_decided(
    queue: list[Request], limit: int, sizes: set[int]
) -> None:
    """The script takes all that fits at once where a model waits for nothing: no preferred size below a full batch."""
    plain = rules(limit, (), 0)
    assert plain.preferred == ()
    assert rules(limit, [limit], 0).preferred == ()
    below = [size for size in sizes if size < limit]
    assert bool(rules(limit, below, 0).preferred) == bool(below)

    taken = 1
    while (
        taken < len(queue)
        and queue[taken].shape_key == queue[0].shape_key
        and sum(r.rows for r in queue[: taken + 1]) <= limit
    ):
        taken += 1

    assert taken == plain.decide(queue, now_us=60)


def test_the_first_request_is_shown_to_a_strategy_and_runs_whatever_it_says() -> None:
    shown: list[Request] = []

    def include(request: Request) -> bool:
        shown.append(request)
        return False

    queue = [Request(1), Request(2)]
    assert 1 == rules(8, (), 100).decide(queue, now_us=60, include=include)
    assert queue == shown


def test_without_dynamic_batching_each_request_runs_alone() -> None:
    alone = BatchRules.of(ModelConfig("m", "python", "", 8, (), ()))

    assert 1 == alone.decide([Request(rows=3), Request()], now_us=60)
    assert (1, 1, 0) == (alone.requests_max, alone.rows_max, alone.delay_us)
