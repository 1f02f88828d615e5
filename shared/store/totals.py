"""Adds up the counts of the scripts, and reads the sums: for executors, which keep the tallies short, and for gateways.

Any process may add up at any time (`total.lua`). Executors do it every second for the models that they serve. So a
tally never holds more than about a second's answers. The counts of a served model never reach their TTL: it is renewed
when something is added, and once a minute. A gateway
adds up before it reads, so that an answer that a client has received is in the statistics that it asks for next.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence

from shared.contract.ids import ShardId
from shared.statistics.tally import COUNT_MAX, ModelLoad, added
from shared.store.keyspace import Keyspace
from shared.store.script_values import TOTAL_MAX
from shared.store.scripts import Scripts

LOADS_PER_CALL = 64
"""Model versions that one call of the script reads: its reply stays small."""
RENEWAL_S = 60
"""How often the TTL of counts is renewed to which nothing is added: the TTL is a day, and each renewal is a line in the
append-only file.
"""
ROUNDS_MAX = 1000
"""Bounds a read while counts are written faster than they are added up."""


class Tallies:
    """The counts of a mesh's models, over all shards."""

    def __init__(self, scripts: Scripts, keys: Keyspace) -> None:
        self._scripts = scripts
        self._keys = keys
        self._renewed_at = -math.inf

    async def add_up(self, loads: Sequence[ModelLoad]) -> None:
        """Adds everything up, and renews the counts' TTL. Raises as `read`."""
        now = time.monotonic()
        renews = now - self._renewed_at >= RENEWAL_S
        await self._total(loads, read=False, renew=renews)
        if renews:
            self._renewed_at = now

    async def read(self, loads: Sequence[ModelLoad]) -> dict[ModelLoad, dict[str, int]]:
        """The sums over all shards, with everything that is counted now.

        Raises redis.ConnectionError when the connection is lost; then some counts are added up, and none is lost.
        """
        sums = await self._total(loads, read=True)
        return {load: {name: min(count, COUNT_MAX) for name, count in added(sums[load]).items()} for load in loads}

    async def _total(
        self, loads: Sequence[ModelLoad], *, read: bool, renew: bool = False
    ) -> dict[ModelLoad, list[dict[str, int]]]:
        sums: dict[ModelLoad, list[dict[str, int]]] = defaultdict(list)
        remaining = [
            (shard, loads[first : first + LOADS_PER_CALL])
            for shard in self._keys.shards
            for first in range(0, len(loads), LOADS_PER_CALL)
        ]
        for _ in range(ROUNDS_MAX):
            calls = [self._scripts.total(part, shard=shard, read=read, renew=renew) for shard, part in remaining]
            outcomes = await self._scripts.run_together(calls)
            again: list[tuple[ShardId, Sequence[ModelLoad]]] = []
            for (shard, part), outcome in zip(remaining, outcomes, strict=True):
                # More may be left. The sums are not complete yet, so this part is asked for again.
                if outcome.added_up == TOTAL_MAX:
                    again.append((shard, part))
                    continue
                for load, counts in zip(part, outcome.sums, strict=read):
                    sums[load].append(counts)
            remaining = again
            if not remaining:
                break
        return sums
