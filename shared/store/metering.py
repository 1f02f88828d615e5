"""Hands to Redis what a process has measured, about once a second: one call of `count` for each shard.

A call whose reply is lost goes again, and its measurements may then count twice. What must be exact is counted
elsewhere (`shared.statistics.tally`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from shared.contract.ids import ShardId
from shared.statistics.meter import LoadMeter
from shared.statistics.tally import ModelLoad, packed
from shared.store.connections.homes import sound
from shared.store.intervals import at_intervals
from shared.store.keyspace import Keyspace
from shared.store.scripts import Scripts

METERING_INTERVAL_S = 1.0


class Metering:
    """meters: those of the process, by the load that each belongs to"""

    def __init__(
        self, scripts: Scripts, keys: Keyspace, meters: Callable[[], Iterable[tuple[ModelLoad, LoadMeter]]]
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        self.meters = meters

    async def run(self) -> None:
        """Hands on, for ever."""
        await at_intervals(METERING_INTERVAL_S, self.flush, "measurements delayed")

    async def flush(self) -> None:
        """Hands on what was measured until now. Raises one of CONNECTION_LOST, or ResponseError."""
        by_shard: dict[ShardId, list[tuple[ModelLoad, LoadMeter, dict[str, int]]]] = defaultdict(list)
        for load, meter in self.meters():
            if taken := meter.take():
                by_shard[self._keys.home_shard(load.model)].append((load, meter, taken))
        if not by_shard:
            return
        calls = [
            self._scripts.count([(load, packed(taken)) for load, _, taken in parts], shard=shard)
            for shard, parts in by_shard.items()
        ]
        outcomes: list[int | Exception] = []
        try:
            outcomes += await self._scripts.run_all(calls)
        finally:
            # Also when the task is cancelled on its way: what is not known to be written is kept.
            told = outcomes or [ConnectionError()] * len(calls)
            for parts, outcome in zip(by_shard.values(), told, strict=True):
                for _, meter, taken in parts if isinstance(outcome, Exception) else ():
                    meter.give_back(taken)
        sound(outcomes)
