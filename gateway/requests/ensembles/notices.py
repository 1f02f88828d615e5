"""What Redis is told of requests to ensembles: the counts of those that are over, and sequences of runs that are over.

A gateway that is killed before it has told does no harm. An abandoned run is found to be apart again by the next step
of its sequence, and ends by its idle time, as the followers of a run that was cut off do. Counts of a few requests are
missing then, as those of requests that were never answered.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from shared.contract.errors import OUTCOMES, Reason
from shared.contract.ids import ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import ReplyMessage, encode
from shared.contract.record import FAILED
from shared.statistics.tally import ModelLoad
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.round_trips import RoundTrips, put_back
from shared.store.script_sender import Call
from shared.store.script_values import Ending
from shared.store.scripts import Scripts

ABANDONED = encode(
    ReplyMessage(
        "",
        error_code=OUTCOMES[Reason.FAILED].code,
        error="another step of the ensemble could not go on",
        reason=Reason.FAILED,
    )
)
"""The reply to steps of an abandoned run that wait for a first slot. Those of a run that was cut off are run."""
UNTOLD_MAX = 65_536
"""Notices of each kind that wait to be told. Beyond it the oldest is dropped."""


class EnsembleNotices:
    """The notices, and the task that tells them."""

    def __init__(self, scripts: Scripts, keys: Keyspace) -> None:
        self._scripts = scripts
        self._keys = keys
        self._trips = RoundTrips(scripts, None, "ensembles")
        self._over: deque[tuple[Ending, bytes]] = deque(maxlen=UNTOLD_MAX)
        self._counts: deque[tuple[ModelLoad, bytes]] = deque(maxlen=UNTOLD_MAX)

    def end(self, ending: Ending, tombstone: bytes) -> None:
        """Ends a sequence with the next round trip; the oldest is forgotten when too many wait for one.

        tombstone  FAILED: its run is abandoned; ENDED: its run was cut off
        """
        self._over.append((ending, tombstone))
        self._trips.due()

    def count(self, load: ModelLoad, counts: bytes) -> None:
        self._counts.append((load, counts))
        self._trips.due()

    async def run(self) -> None:
        await self._trips.run(self._depart)

    async def _depart(self) -> bool:
        """One round trip. Raises one of CONNECTION_LOST; endings are repeated then, counts are not."""
        taken = [self._over.popleft() for _ in range(min(len(self._over), SCRIPT_STEPS_MAX))]
        counts = [self._counts.popleft() for _ in range(min(len(self._counts), SCRIPT_STEPS_MAX))]
        if self._over or self._counts:
            self._trips.due()
        try:
            await self._trips.tell(self._calls(taken, counts))
        except CONNECTION_LOST:
            put_back(self._over, taken)
            raise
        return True

    def _calls(self, taken: list[tuple[Ending, bytes]], counts: list[tuple[ModelLoad, bytes]]) -> list[Call[Any]]:
        sequences: dict[tuple[ShardId, bytes], list[Ending]] = {}
        for ending, tombstone in taken:
            sequences.setdefault((self._keys.shard_of(ending.sequence), tombstone), []).append(ending)
        loads: dict[ShardId, list[tuple[ModelLoad, bytes]]] = {}
        for load, packed in counts:
            loads.setdefault(self._keys.home_shard(load.model), []).append((load, packed))
        return [
            *(
                self._scripts.end(some, tombstone=tombstone, reply=ABANDONED if tombstone == FAILED else b"")
                for (_, tombstone), some in sequences.items()
            ),
            *(self._scripts.count(some, shard=shard) for shard, some in loads.items()),
        ]
