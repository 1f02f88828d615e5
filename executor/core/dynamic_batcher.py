"""The dynamic batcher's rules for one model version: which requests of its queue run together (triton-spec 3.2, 3.4).

Pure. The queue lies in Redis, one for all executors; its order (priorities, lateness) and its timeout policies are
applied there. Here the front of the queue, as an executor has read it, is turned into a decision. Most reads need no
decision here: where only the size and the age of the oldest request count, the script takes the batch at once.

Source: Triton core, dynamic_batch_scheduler.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from executor.core.batching import Queued, Wait, decide_queue
from shared.contract.model_config import ModelConfig

Q = TypeVar("Q", bound=Queued)


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How batches of a model version are formed.

    requests_max, rows_max  of one batch. A model without dynamic batching runs each request alone (Triton's default
                            scheduler), whatever rows it brings
    preferred     sizes that are worth a batch; empty: only a full batch
    delay_us      how long the oldest request may wait for others
    """

    requests_max: int
    rows_max: int
    preferred: tuple[int, ...]
    delay_us: int

    @classmethod
    def of(cls, config: ModelConfig) -> BatchRules:
        """The rules that a model's configuration sets."""
        batching = config.dynamic_batching
        if batching is None:
            return cls(1, 1, (), 0)
        limit = max(1, config.max_batch_size)
        sizes = batching.preferred_batch_sizes
        return cls(limit, limit, () if set(sizes) <= {limit} else sizes, batching.max_queue_delay_us)

    def decide(
        self,
        front: Sequence[Q],
        *,
        now_us: int,
        deadline_us: int | None = None,
        was_busy: bool = False,
        include: Callable[[Q], bool] | None = None,
    ) -> int | Wait:
        """How many requests from the front of the queue run now, or when to decide again.

        front        in the order in which the requests are to run, late ones already handled; one more than fits, if
                     there is one
        deadline_us  microseconds until the next request of the queue becomes too late
        was_busy     the requests gathered while every instance here ran a batch
        include      a batch strategy of the model's own
        """
        decision = decide_queue(
            front,
            max_batch_size=self.rows_max,
            preferred=self.preferred,
            max_queue_delay_us=self.delay_us,
            now_us=now_us,
            was_busy=was_busy,
            include=include,
        )
        if isinstance(decision, Wait) and deadline_us is not None:
            until_us = now_us + deadline_us
            return Wait(until_us if decision.until_us is None else min(decision.until_us, until_us))
        return decision
