"""Batches of rows from any slots: where a slot is a place for a state."""

from __future__ import annotations

import msgspec

from executor.core.batching import Wait
from executor.core.sequence_batches import AnySlotSteps, Batch
from shared.contract.ids import SlotIndex
from shared.contract.model_config import Direct


class Shaped(msgspec.Struct, frozen=True):
    """A step of some shape."""

    name: int
    shape_key: str = ""


def offered(strategy: Direct, *steps: Shaped, rows: int = 4) -> AnySlotSteps[Shaped]:
    """Steps that became ready one after the other, in slots far apart; the n-th arrived at n microseconds."""
    ready = AnySlotSteps[Shaped](strategy, rows)
    for number, step in enumerate(steps):
        ready.offer(SlotIndex(1000 - 7 * number), step, arrived_us=number, now_us=number)
    return ready


def names(batch: Batch[Shaped] | Wait) -> list[int]:
    assert not isinstance(batch, Wait)
    return [step.name for step in batch if step is not None]


def test_a_batch_takes_the_first_that_became_ready_up_to_its_rows() -> None:
    ready = offered(Direct(), *map(Shaped, range(6)))
    assert [0, 1, 2, 3] == names(ready.decide(9))

    for number in range(4):
        ready.withdraw(SlotIndex(1000 - 7 * number))

    assert [4, 5] == names(ready.decide(9))


def test_steps_of_another_shape_wait_for_the_next_batch() -> None:
    ready = offered(Direct(), Shaped(0, "a"), Shaped(1, "b"), Shaped(2, "a"))

    assert [0, 2] == names(ready.decide(9))


def test_what_follows_a_batch_is_settled_when_steps_of_one_shape_fill_every_row() -> None:
    mixed = offered(Direct(), Shaped(0, "a"), Shaped(1, "b"), Shaped(2, "a"), rows=2)
    assert [0, 2] == names(mixed.full(9) or [])

    mixed.withdraw(SlotIndex(1000 - 7 * 2))

    assert mixed.full(9) is None, "the row beside the first step is for one of its shape"


def test_it_waits_for_more_rows_as_the_configuration_says() -> None:
    patient = Direct(max_queue_delay_us=100, minimum_slot_utilization=0.75)

    assert Wait(101) == offered(patient, *map(Shaped, range(2))).decide(50)
    assert [0, 1] == names(offered(patient, *map(Shaped, range(2))).decide(101))
    assert [0, 1, 2] == names(offered(patient, *map(Shaped, range(3))).decide(50))


def test_there_is_nothing_to_run_without_a_step() -> None:
    assert Wait() == offered(Direct()).decide(0)


def test_a_model_without_batches_runs_one_step_at_a_time() -> None:
    assert [0] == names(offered(Direct(), Shaped(0), Shaped(1), rows=0).decide(9))
