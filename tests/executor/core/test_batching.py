"""Direct, oldest and dynamic rules over (what is ready, now)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import pytest

from executor.core.batching import Wait, decide_direct, decide_queue
from shared.contract.ids import SlotIndex
from shared.contract.model_config import Direct


@dataclass(frozen=True)
class Item:
    queued_us: int = 0
    shape_key: Hashable = None
    rows: int = 1


def slots(**items: Item) -> dict[SlotIndex, Item]:
    return {SlotIndex(int(name[1:])): item for name, item in items.items()}


class TestDirect:
    def test_nothing_ready_waits_for_something_new(self) -> None:
        assert Wait(None) == decide_direct({}, strategy=Direct(), max_batch_size=4, now_us=0)

    def test_position_is_the_slot_and_gaps_are_null_rows(self) -> None:
        one, three = Item(5), Item(3)

        assert [None, one, None, three] == decide_direct(
            slots(s3=three, s1=one), strategy=Direct(), max_batch_size=8, now_us=9
        )

    def test_waits_for_utilization_until_the_delay_is_over(self) -> None:
        strategy = Direct(max_queue_delay_us=100, minimum_slot_utilization=0.5)
        ready = slots(s0=Item(10))

        assert Wait(111) == decide_direct(ready, strategy=strategy, max_batch_size=4, now_us=50)
        assert [ready[SlotIndex(0)]] == decide_direct(ready, strategy=strategy, max_batch_size=4, now_us=111)
        assert [ready[SlotIndex(0)]] == decide_direct(ready, strategy=strategy, max_batch_size=2, now_us=50)

    @pytest.mark.parametrize("strategy", [Direct(100, 0.0), Direct(0, 0.9)])
    def test_delay_and_utilization_count_only_together(self, strategy: Direct) -> None:
        assert [Item(10)] == decide_direct(slots(s0=Item(10)), strategy=strategy, max_batch_size=4, now_us=10)

    def test_a_step_of_other_shapes_waits_and_the_oldest_goes_first(self) -> None:
        small, large = Item(5, "small"), Item(3, "large")

        assert [None, large] == decide_direct(slots(s0=small, s1=large), strategy=Direct(), max_batch_size=4, now_us=9)

    def test_the_batch_reaches_up_to_the_highest_ready_slot_whatever_its_shapes(self) -> None:
        small, large = Item(3, "small"), Item(5, "large")

        assert [small, None] == decide_direct(slots(s0=small, s1=large), strategy=Direct(), max_batch_size=4, now_us=9)


def decide(
    queue: list[Item],
    *,
    limit: int = 8,
    preferred: tuple[int, ...] = (),
    delay: int = 0,
    now: int = 0,
) -> int | Wait:
    return decide_queue(
        queue,
        max_batch_size=limit,
        preferred=preferred,
        max_queue_delay_us=delay,
        now_us=now,
    )


class TestQueue:
    def test_without_delay_whatever_waits_runs(self) -> None:
        assert 3 == decide([Item()] * 3)

    def test_a_model_without_batching_runs_one_at_a_time(self) -> None:
        assert 1 == decide([Item()] * 3, limit=0)

    def test_the_largest_preferred_size_goes_at_once(self) -> None:
        assert 4 == decide([Item(10)] * 5, preferred=(2, 4), delay=100, now=20)

    def test_past_the_delay_the_preferred_size_does_not_count(self) -> None:
        assert 5 == decide([Item(10)] * 5, preferred=(2, 4), delay=100, now=110)

    def test_past_the_largest_preferred_size_there_is_nothing_to_wait_for(self) -> None:
        assert 1 == decide([Item(10, rows=5)], preferred=(4,), delay=100, now=20)

    def test_other_shapes_close_the_batch(self) -> None:
        assert 2 == decide([Item(10, "a"), Item(10, "a"), Item(10, "b")], delay=100, now=20)

    def test_a_request_larger_than_the_limit_is_never_split(self) -> None:
        assert 1 == decide([Item(rows=9), Item()], limit=8)
