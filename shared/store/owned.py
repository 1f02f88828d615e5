"""How many sequences an executor owns of each of many models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.contract.ids import ExecutorId, ShardId
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace

SIZES = """#!lua flags=no-writes
local sizes = {}
for at, key in ipairs(KEYS) do
    sizes[at] = redis.call('SCARD', key)
end
return sizes
"""
"""The sizes of sets. A command for each would take twenty times as long in the process that asks, and hold its loop."""
KEYS_MAX = 1000
"""Of one call."""


async def owned_counts(
    redis: Redis, keys: Keyspace, executor: ExecutorId, models: Sequence[str], shards: Iterable[ShardId]
) -> list[int]:
    """The counts over these shards, in the order of the models. Raises one of `CONNECTION_LOST`."""
    sums = [0] * len(models)
    for shard in shards:
        for begin in range(0, len(models), KEYS_MAX):
            owned = [keys.owned(shard, executor, model) for model in models[begin : begin + KEYS_MAX]]
            for at, size in enumerate(await redis.eval(SIZES, len(owned), *owned), begin):
                sums[at] += size
    return sums
