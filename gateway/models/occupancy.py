"""How many sequences of a model live, and how many slots its executors offer and have in use. Read at each scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contract.messages import ExecutorRegistration
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace


class Slots(NamedTuple):
    """Slots of a model's instances on the executors of one name."""

    offered: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The sequences and slots of all versions of a model.

    live   sequences that were answered once and are not over, in a slot or without one; `--live-max` bounds them
    slots  by the executor's name
    """

    live: int = 0
    slots: Mapping[str, Slots] = field(default_factory=dict[str, Slots])


async def read_occupancies(
    redis: Redis, keys: Keyspace, models: Sequence[str], executors: Sequence[ExecutorRegistration]
) -> dict[str, Occupancy]:
    """The occupancy of each model, in one round trip. Raises one of `CONNECTION_LOST`.

    executors  those whose lease holds
    """
    shards = keys.shards
    asked = [
        (model, executor, sum(served.instances * served.slots for served in executor.models if served.model == model))
        for model in models
        for executor in executors
        if any(served.model == model for served in executor.models)
    ]
    pipe = redis.pipeline(transaction=False)
    for shard in shards:
        for model in models:
            pipe.zcard(keys.deadlines(shard, model))
        for model, executor, _ in asked:
            pipe.scard(keys.owned(shard, executor.executor, model))
    counts: list[int] = await pipe.execute()
    width = len(models) + len(asked)
    sums = [sum(counts[at::width]) for at in range(width)]
    slots: dict[str, dict[str, Slots]] = {model: {} for model in models}
    for (model, executor, offered), used in zip(asked, sums[len(models) :], strict=True):
        # Two lives of one name can overlap while the older one leaves.
        before = slots[model].get(executor.name, Slots())
        slots[model][executor.name] = Slots(before.offered + offered, before.used + used)
    return {model: Occupancy(live, slots[model]) for model, live in zip(models, sums, strict=False)}
