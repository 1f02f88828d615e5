"""Sequences whose connection is gone before their END (model parameter `orphan_grace_microseconds`).

A connection is a gRPC stream, or one unary call or HTTP request that is still without its answer. It is gone when it
breaks, when its caller cancels it, and also when a stream is closed in order: its sequences may go on over any other
connection, but a client that is not there cannot end them. A gateway that stops cuts its connections itself, and its
clients come back elsewhere: that counts for nothing.

Each connection notes, of the sequences that it has not ended, the latest step that the mesh accepted from it. Whether
somebody else has used the sequence since then is for the script to say (`orphan.lua`). It is told after the step was
accepted, so this needs no order with what `gateway.requests.dispatch` sends, and it may be late, or never happen: then
the sequence has its whole idle time, as without the parameter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from redis.backoff import FullJitterBackoff
from redis.exceptions import ResponseError

from gateway.requests.waiting import PendingRequest
from shared.contract.ids import GatewayId, SequenceId, ShardId
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.contract.messages import StepFlag
from shared.process import logs
from shared.store.keyspace import Keyspace
from shared.store.redis_client import BACKOFF_BASE_S, BACKOFF_CAP_S, CONNECTION_LOST
from shared.store.scripts import Orphan, Scripts

NOTED_MAX = 16_384
"""Open sequences of one connection that are noted, about 200 bytes each; of more, those used least recently are not."""
UNTOLD_MAX = 65_536
"""Orphans that Redis is still to be told of; of more, those that were to be told first are not."""


class ConnectionSequences:
    """The open sequences of one connection. orphaned: gets them when it is gone."""

    def __init__(self, orphaned: Callable[[Orphan], None]) -> None:
        self._orphaned = orphaned
        self._open: dict[SequenceId, Orphan] = {}
        self._gone = False

    def used(self, waiting: PendingRequest) -> None:
        """The mesh has accepted this step of a sequence, or knew it."""
        sequence, grace_ms = waiting.admitted.sequence, waiting.record.config.orphan_grace_ms
        assert sequence is not None, "only steps of sequences have a user"
        self._open.pop(sequence, None)
        if waiting.admitted.flags & StepFlag.END:
            return
        orphan = Orphan(sequence, waiting.call.model, waiting.token, grace_ms)
        if self._gone:
            self._orphaned(orphan)
            return
        self._open[sequence] = orphan
        if len(self._open) > NOTED_MAX:
            del self._open[next(iter(self._open))]

    def end(self) -> None:
        """It is gone. What is accepted of it from now on is an orphan's at once."""
        self._gone = True
        for orphan in self._open.values():
            self._orphaned(orphan)
        self._open.clear()


class Orphans:
    """Tells Redis of orphans, in the background."""

    def __init__(self, scripts: Scripts, keys: Keyspace, gateway: GatewayId) -> None:
        self._scripts = scripts
        self._keys = keys
        self._gateway = gateway
        self._untold: deque[Orphan] = deque(maxlen=UNTOLD_MAX)
        self._work = asyncio.Event()

    def tell(self, orphan: Orphan) -> None:
        """Queues an orphan for the next round trip."""
        self._untold.append(orphan)
        self._work.set()

    async def run(self) -> None:
        """Tells until it is cancelled."""
        backoff = FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)
        failures = 0
        while True:
            await self._work.wait()
            taken = [self._untold.popleft() for _ in range(min(len(self._untold), SCRIPT_STEPS_MAX))]
            if not self._untold:
                self._work.clear()
            try:
                await self._tell_now(taken)
                failures = 0
            except CONNECTION_LOST:
                self._untold.extendleft(reversed(taken))
                self._work.set()
                failures += 1
                await asyncio.sleep(backoff.compute(failures))

    async def _tell_now(self, orphans: Sequence[Orphan]) -> None:
        """One round trip. Raises one of CONNECTION_LOST: then it is all to be told again."""
        shards: dict[ShardId, list[Orphan]] = {}
        for orphan in orphans:
            shards.setdefault(self._keys.shard_of(orphan.sequence), []).append(orphan)
        calls = [self._scripts.orphan(some, shard=shard, gateway=self._gateway) for shard, some in shards.items()]
        for outcome in await self._scripts.run_all(calls):
            if isinstance(outcome, ResponseError):
                logs.error("redis refused a script", error=str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
