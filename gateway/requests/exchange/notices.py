"""What Redis is told with nobody waiting for it: sequences whose connection is gone, those of an ensemble whose run is
over, and counts of requests to ensembles.

A gateway that is killed before it has told does no harm. An orphan has its whole idle time then. An abandoned run is
found to be apart again by the next step of its sequence, and ends by its idle time, as the followers of a run that was
cut off do. Counts of a few requests are missing, as those of requests that were never answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from shared.contract.errors import OUTCOMES, Reason
from shared.contract.ids import GatewayId, ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import ReplyMessage, encode
from shared.contract.record import FAILED
from shared.statistics.tally import ModelLoad
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.round_trips import RoundTrips, put_back
from shared.store.script_sender import Call
from shared.store.script_values import Ending, Orphan
from shared.store.scripts import Scripts

T = TypeVar("T")

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


class Notices:
    """The notices of one gateway, and the task that tells them."""

    def __init__(self, scripts: Scripts, keys: Keyspace, gateway: GatewayId) -> None:
        self._scripts = scripts
        self._keys = keys
        self._gateway = gateway
        self._trips = RoundTrips(scripts, None, "notices")
        self._orphans: deque[Orphan] = deque(maxlen=UNTOLD_MAX)
        self._over: deque[tuple[Ending, bytes]] = deque(maxlen=UNTOLD_MAX)
        self._counts: deque[tuple[ModelLoad, bytes]] = deque(maxlen=UNTOLD_MAX)

    def orphan(self, orphan: Orphan) -> None:
        """A sequence's connection is gone before its END (`gateway.requests.orphans`)."""
        self._orphans.append(orphan)
        self._trips.due()

    def end(self, ending: Ending, tombstone: bytes) -> None:
        """Ends a sequence. tombstone  FAILED: its run is abandoned; ENDED: its run was cut off"""
        self._over.append((ending, tombstone))
        self._trips.due()

    def count(self, load: ModelLoad, counts: bytes) -> None:
        self._counts.append((load, counts))
        self._trips.due()

    async def run(self) -> None:
        await self._trips.run(self._depart)

    async def _depart(self) -> bool:
        """One round trip. Raises one of CONNECTION_LOST; all but counts is told again then, as far as there is room."""
        orphans, over, counts = _taken(self._orphans), _taken(self._over), _taken(self._counts)
        if self._orphans or self._over or self._counts:
            self._trips.due()
        try:
            await self._trips.tell(self._calls(orphans, over, counts))
        except CONNECTION_LOST:
            put_back(self._orphans, orphans)
            put_back(self._over, over)
            raise
        return True

    def _calls(
        self,
        orphans: Sequence[Orphan],
        over: Sequence[tuple[Ending, bytes]],
        counts: Sequence[tuple[ModelLoad, bytes]],
    ) -> list[Call[Any]]:
        left: dict[ShardId, list[Orphan]] = {}
        for orphan in orphans:
            left.setdefault(self._keys.shard_of(orphan.sequence), []).append(orphan)
        sequences: dict[tuple[ShardId, bytes], list[Ending]] = {}
        for ending, tombstone in over:
            sequences.setdefault((self._keys.shard_of(ending.sequence), tombstone), []).append(ending)
        loads: dict[ShardId, list[tuple[ModelLoad, bytes]]] = {}
        for load, packed in counts:
            loads.setdefault(self._keys.home_shard(load.model), []).append((load, packed))
        return [
            *(self._scripts.orphan(some, gateway=self._gateway) for some in left.values()),
            *(
                self._scripts.end(some, tombstone=tombstone, reply=ABANDONED if tombstone == FAILED else b"")
                for (_, tombstone), some in sequences.items()
            ),
            *(self._scripts.count(some, shard=shard) for shard, some in loads.items()),
        ]


def _taken(queue: deque[T]) -> list[T]:
    """The oldest of a queue, as many as one call of a script takes."""
    return [queue.popleft() for _ in range(min(len(queue), SCRIPT_STEPS_MAX))]
