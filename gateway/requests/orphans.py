"""Orphans: sequences whose connection is gone before their END (model parameter `orphan_grace_microseconds`).

A connection here is a gRPC stream, or one unary call or HTTP request that has no answer yet. It is gone when it breaks,
when the client cancels it, and also when the client closes a stream in order. The sequences of a lost connection may go
on over any other one; but if the client is dead, nobody will end them, so they get a shorter idle time. A gateway that
stops closes its connections itself, and its clients go on through another gateway: this makes no orphans.

A connection remembers, for each of its open sequences, the latest step that the mesh accepted over it. The script
`orphan.lua` compares: if another connection has used the sequence since, the sequence is no orphan. Redis is told of an
orphan only after it has accepted that step, so no order with `gateway.requests.dispatch` is needed. If the message is
late or never sent, the sequence has its whole idle time, as without the parameter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from gateway.requests.waiting import PendingRequest
from shared.contract.ids import GatewayId, SequenceId, ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import END
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from shared.store.round_trips import RoundTrips, put_back
from shared.store.script_values import Orphan
from shared.store.scripts import Scripts

NOTED_MAX = 16_384
"""Open sequences that one connection remembers, about 200 bytes each. Beyond it the least recently used is dropped."""
UNTOLD_MAX = 65_536
"""Orphans that wait to be told to Redis. Beyond it the oldest is dropped."""


class ConnectionSequences:
    """The open sequences of one connection. orphaned: called with each of them when the connection is gone."""

    def __init__(self, orphaned: Callable[[Orphan], None]) -> None:
        self._orphaned = orphaned
        # Not a plain dict: to find its oldest key takes the longer, the more keys were removed before it.
        self._open: OrderedDict[SequenceId, Orphan] = OrderedDict()
        self._gone = False

    def used(self, pending: PendingRequest) -> None:
        """The mesh has accepted this step of a sequence, or knew it."""
        sequence, grace_ms = pending.admitted.sequence, pending.record.config.orphan_grace_ms
        assert sequence is not None, "only steps of sequences have a user"
        # Removed and put in again below: thereby ordered by last use.
        self._open.pop(sequence, None)
        if pending.admitted.flags & END:
            return
        orphan = Orphan(sequence, pending.token, grace_ms)
        if self._gone:
            self._orphaned(orphan)
            return
        self._open[sequence] = orphan
        if len(self._open) > NOTED_MAX:
            self._open.popitem(last=False)

    def end(self) -> None:
        """The connection is gone: its sequences are orphans. So is each whose step is accepted only after this."""
        self._gone = True
        for orphan in self._open.values():
            self._orphaned(orphan)
        self._open.clear()


class Orphans:
    """The task that tells Redis of orphans."""

    def __init__(self, scripts: Scripts, keys: Keyspace, gateway: GatewayId) -> None:
        self._scripts = scripts
        self._trips = RoundTrips(scripts, None, "orphans")
        self._keys = keys
        self._gateway = gateway
        self._untold: deque[Orphan] = deque(maxlen=UNTOLD_MAX)

    def tell(self, orphan: Orphan) -> None:
        """Queues an orphan for the next round trip."""
        self._untold.append(orphan)
        self._trips.due()

    async def run(self) -> None:
        await self._trips.run(self._depart)

    async def _depart(self) -> bool:
        """One round trip. Raises one of CONNECTION_LOST; then the orphans are told again, as far as they have room."""
        taken = [self._untold.popleft() for _ in range(min(len(self._untold), SCRIPT_STEPS_MAX))]
        if self._untold:
            self._trips.due()
        shards: dict[ShardId, list[Orphan]] = {}
        for orphan in taken:
            shards.setdefault(self._keys.shard_of(orphan.sequence), []).append(orphan)
        calls = [self._scripts.orphan(some, gateway=self._gateway) for some in shards.values()]
        try:
            await self._trips.tell(calls)
        except CONNECTION_LOST:
            put_back(self._untold, taken)
            raise
        return True
