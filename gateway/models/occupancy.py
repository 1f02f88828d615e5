"""How many sequences of a model live, and how many slots its executors offer and have in use. Read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contract.messages import ExecutorRegistration
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.owned import owned_counts
from shared.store.waiting_line import read_live


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
    """The occupancy of each model. Raises one of `CONNECTION_LOST`.

    executors  those whose lease holds
    """
    live = await read_live(redis, keys, models)
    slots: dict[str, dict[str, Slots]] = {model: {} for model in models}
    for executor in executors:
        offered = Counter[str]()
        for served in executor.models:
            if served.model in slots:
                offered[served.model] += served.instances * served.slots
        used = await owned_counts(redis, keys, executor.executor, list(offered), keys.shards)
        for (model, count), owned in zip(offered.items(), used, strict=True):
            # Two lives of one name can overlap while the older one leaves.
            before = slots[model].get(executor.name, Slots())
            slots[model][executor.name] = Slots(before.offered + count, before.used + owned)
    return {model: Occupancy(live[model], slots[model]) for model in models}
