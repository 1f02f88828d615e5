"""Which steps run together: Triton's direct, oldest and dynamic rules, as functions of what is ready and the time.

Pure: the caller brings the time and acts on the decision. A decision is either the members of a batch, or the time at
which to decide again. Times are microseconds of one monotonic clock.

Source of the rules: Triton core, sequence_batch_scheduler.cc and dynamic_batch_scheduler.cc (triton-spec 1.4, 1.5,
3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from shared.contract.ids import SlotIndex
from shared.contract.model_config import Direct


class Queued(Protocol):
    """What batching must know of a step or request.

    queued_us  when it reached this batcher
    shape_key  equal for two requests that may share a batch (triton-spec 1.9)
    rows       rows that it takes in the batch; 1 for a step of a sequence
    """

    @property
    def queued_us(self) -> int: ...
    @property
    def shape_key(self) -> Hashable: ...
    @property
    def rows(self) -> int: ...


Q = TypeVar("Q", bound=Queued)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run yet. until_us: decide again then at the latest; None: only when something new arrives"""

    until_us: int | None = None


NOTHING_YET = Wait()
"""No step is ready: only an event can change that."""
_queued_us = attrgetter("queued_us")


def decide_direct(
    ready: Mapping[SlotIndex, Q], *, strategy: Direct, max_batch_size: int, now_us: int
) -> list[Q | None] | Wait:
    """The next batch of the direct strategy: position in the list is the slot, None is a null row.

    ready    the head step of each slot that has one
    max_batch_size  rows of a batch, from 1: also where the model has no batch dimension
    returns  slots 0 .. the highest ready one; a slot whose shapes differ from the oldest step's is a null row this time
             (Triton goes by the lowest slot, which may keep a sequence of other shapes waiting for ever)
    """
    if not ready:
        return NOTHING_YET
    oldest = min(ready.values(), key=_queued_us)
    wait = wait_of(oldest, len(ready) / max_batch_size, strategy, now_us)
    if wait is not None:
        return wait
    # By the oldest step, so that no shape has to wait for ever.
    members = {slot: step for slot, step in ready.items() if step.shape_key == oldest.shape_key}
    return [members.get(SlotIndex(slot)) for slot in range(max(ready) + 1)]


def wait_of(oldest: Queued, utilization: float, strategy: Direct, now_us: int) -> Wait | None:
    """How long the direct strategy waits for more steps; None if it does not.
    utilization: the share of the batch's rows that is ready
    """
    if strategy.max_queue_delay_us == 0:
        return None
    until_us = oldest.queued_us + strategy.max_queue_delay_us
    # Triton waits while the delay is not exceeded, so the deadline itself still waits.
    return Wait(until_us + 1) if now_us <= until_us and utilization < strategy.minimum_slot_utilization else None


def decide_queue(
    queue: Iterable[Q],
    *,
    max_batch_size: int,
    preferred: Sequence[int],
    max_queue_delay_us: int,
    now_us: int,
    was_busy: bool = False,
    include: Callable[[Q], bool] | None = None,
) -> int | Wait:
    """How many requests from the front of a queue run now: the rule of Triton's dynamic batcher, and of the oldest
    strategy.

    queue      in the order in which the requests are to run; only as much of it is read as fits a batch
    max_batch_size  as of `decide_direct`
    preferred  row counts that are worth a batch; empty means max_batch_size
    was_busy   the requests gathered while the instance ran a batch
    include    a model's own decision (triton-spec 3.4), asked for each request in order. It is asked for the first
               request too, but that runs anyway
    returns    a number of members (not rows) >= 1, or when to decide again

    While the oldest request has not waited for the whole delay:
    * The largest preferred size that was reached runs. If none was reached, and the next request would exceed the
      largest preferred size, what fits below that size runs.
    * Otherwise everything that fits runs if it cannot grow, and else it waits.
    Once the oldest request has waited for the delay, everything that fits runs.

    With a delay, a batch that gathered for a busy instance is not closed at a preferred size: beyond the largest one it
    takes whatever fits, so that no request is left to wait for the whole delay alone. (Triton does the same.) Without a
    delay, a preferred size closes the batch, and the other requests go next.
    """
    sizes = set(preferred) or {max_batch_size}
    waiting = iter(queue)
    first = next(waiting, None)
    if first is None:
        return NOTHING_YET
    if include is not None:
        include(first)
    members, rows, best, grows = _fitting(first, waiting, sizes, max_batch_size, include)
    until_us = first.queued_us + max_queue_delay_us
    is_late = max_queue_delay_us > 0 and now_us >= until_us
    is_complete = max_queue_delay_us == 0 or not grows or rows >= max(sizes)
    # See the last paragraph of the docstring.
    if best and not is_late and not (was_busy and is_complete and max_queue_delay_us > 0):
        return best
    if is_late or is_complete:
        return members
    return Wait(until_us)


def _fitting(
    first: Q, others: Iterable[Q], sizes: set[int], limit: int, include: Callable[[Q], bool] | None
) -> tuple[int, int, int, bool]:
    """What fits a batch: requests, their rows, how many requests reach the largest preferred size, or what fits below
    it (0: neither), and whether the batch can grow. sizes: the preferred ones; limit: rows
    """
    largest = max(sizes)
    members, rows = 1, first.rows
    best = 1 if rows in sizes else 0
    for item in others:
        reached = rows + item.rows
        # No preferred size was reached, and with this request the largest would be passed over.
        if not best and reached > largest:
            best = members
        if reached > limit or item.shape_key != first.shape_key or (include is not None and not include(item)):
            return members, rows, best, False
        members += 1
        rows = reached
        if rows in sizes:
            best = members
    return members, rows, best, True
