"""The ready steps of one instance's sequences, and which of them run together: the direct and the oldest strategy.

Pure: the caller brings the time. A slot offers at most one step, the next one of its sequence. So a batch never holds
two steps of a sequence, and a step that waits behind another step is offered when that one is done.

The two strategies measure waiting differently, as in Triton. Direct measures from the arrival of a step. Oldest is a
queue of its own, so there a step's age begins when it becomes the head of its sequence. Batches are taken from the
front of that queue, and an instance runs one batch at a time: so results come in queue order.

Source: Triton core, sequence_batch_scheduler.cc (triton-spec 1.4, 1.5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

import msgspec

from executor.core.batching import NOTHING_YET, Wait, decide_direct, decide_queue, wait_of
from shared.contract.ids import SlotIndex
from shared.contract.model_config import Direct, Oldest, SequenceBatching


class Shaped(Protocol):
    """A step, as far as batching knows it. shape_key: equal for two steps that may share a batch (triton-spec 1.9)"""

    @property
    def shape_key(self) -> Hashable: ...


S = TypeVar("S", bound=Shaped)


class Ready(msgspec.Struct, Generic[S], frozen=True, eq=False):
    """A step that may run. queued_us: since when it counts as waiting. Satisfies `batching.Queued`."""

    step: S
    queued_us: int
    shape_key: Hashable
    rows: int = 1


Batch = Sequence[S | None]
"""The rows of a batch, in order; None is a null row."""


class SlotSteps(ABC, Generic[S]):
    """What every strategy keeps: the ready step of each slot, in the order in which they became ready."""

    def __init__(self, max_batch_size: int) -> None:
        self._rows = max(1, max_batch_size)
        self._ready: dict[SlotIndex, Ready[S]] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def offer(self, slot: SlotIndex, step: S, *, arrived_us: int, now_us: int) -> None:
        """Takes in that the slot's next step may run, if that is not known already.

        arrived_us  when the step reached this executor
        """
        if slot not in self._ready:
            self._ready[slot] = Ready(step, self._since_us(arrived_us, now_us), step.shape_key)

    def withdraw(self, slot: SlotIndex) -> None:
        """Forgets the slot's step: a batch has taken it, or its sequence is gone."""
        self._ready.pop(slot, None)

    def full(self, now_us: int) -> Batch[S] | None:
        """The batch that follows the running one, if every row of it has its step. It is settled then: steps that come
        later change nothing about it.
        """
        if len(self._ready) < self._rows:
            return None
        batch = self.decide(now_us, was_busy=True)
        return None if isinstance(batch, Wait) or len(batch) < self._rows or None in batch else batch

    @abstractmethod
    def decide(self, now_us: int, *, was_busy: bool = False) -> Batch[S] | Wait:
        """The next batch, or when to decide again. The steps of the batch stay until they are withdrawn.

        was_busy  a batch has ended just now
        """

    def _since_us(self, arrived_us: int, now_us: int) -> int:
        """Since when a step that is ready now counts as waiting."""
        return arrived_us


class DirectSteps(SlotSteps[S]):
    """The direct strategy where a slot is a row of the batch: position in the batch is the slot."""

    def __init__(self, strategy: Direct, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self._strategy = strategy

    def decide(self, now_us: int, *, was_busy: bool = False) -> Batch[S] | Wait:
        batch = decide_direct(self._ready, strategy=self._strategy, max_batch_size=self._rows, now_us=now_us)
        return batch if isinstance(batch, Wait) else [ready and ready.step for ready in batch]


class OldestSteps(SlotSteps[S]):
    """The oldest strategy: candidates in a queue, in the order in which their steps became ready."""

    def __init__(self, strategy: Oldest, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self._strategy = strategy

    def decide(self, now_us: int, *, was_busy: bool = False) -> Batch[S] | Wait:
        size = decide_queue(
            self._ready.values(),
            max_batch_size=self._rows,
            preferred=self._strategy.preferred_batch_sizes,
            max_queue_delay_us=self._strategy.max_queue_delay_us,
            now_us=now_us,
            was_busy=was_busy,
        )
        return size if isinstance(size, Wait) else [ready.step for ready in islice(self._ready.values(), size)]

    def _since_us(self, arrived_us: int, now_us: int) -> int:
        return now_us


class AnySlotSteps(DirectSteps[S]):
    """The direct strategy where a slot is a place for a state and no row of the batch: the steps that became ready
    first, from any slots. It waits for others as the configuration says, and a batch has no null rows.
    """

    def decide(self, now_us: int, *, was_busy: bool = False) -> Batch[S] | Wait:
        if not self._ready:
            return NOTHING_YET
        first = next(iter(self._ready.values()))
        wait = wait_of(first, len(self._ready) / self._rows, self._strategy, now_us)
        if wait is not None:
            return wait
        fitting = (ready.step for ready in self._ready.values() if ready.shape_key == first.shape_key)
        return list(islice(fitting, self._rows))


def slot_steps(batching: SequenceBatching, max_batch_size: int, *, any_slot: bool) -> SlotSteps[S]:
    """The strategy that a model is configured with, for one instance. any_slot: slots are no rows of the batch"""
    match batching.strategy:
        case Direct() as direct if any_slot:
            return AnySlotSteps(direct, max_batch_size)
        case Direct() as direct:
            return DirectSteps(direct, max_batch_size)
        case Oldest() as oldest:
            return OldestSteps(oldest, max_batch_size)
