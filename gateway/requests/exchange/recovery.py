"""Goes over to another run of the Redis server, after a restart or a failover.

The gateway's connections are bound to one run: they refuse to talk to another one until `ServerRun.agree`. So nothing
new reaches the new run before the requests that the old one had accepted were checked against it, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.requests.exchange.dispatch import Dispatch
from gateway.requests.exchange.replies import Replies
from shared.contract.ids import ShardId
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.homes import shards_at
from shared.store.connections.redis_client import pause_s
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace


class RestartRecovery:
    """The task that goes over. open_client: makes a client whose connections are bound to a run."""

    def __init__(
        self,
        open_client: Callable[[ServerRun], Redis],
        keys: Keyspace,
        run: ServerRun,
        replies: Replies,
        dispatch: Dispatch,
    ) -> None:
        self._open = open_client
        self._keys = keys
        self._run = run
        self._replies = replies
        self._dispatch = dispatch
        # Of all attempts: the one after a failure finds the streams that it has made.
        self._lost = set[ShardId]()

    async def run(self) -> None:
        """Watches for another run until it is cancelled."""
        failures = 0
        while True:
            await self._run.changed.wait()
            recovered = await asyncio.gather(*map(self._recovered, self._run.others))
            failures = 0 if all(recovered) else failures + 1
            if failures:
                await asyncio.sleep(pause_s(failures))

    async def _recovered(self, home: str) -> bool:
        """Goes over to another run of this home. Those of a Cluster do not wait for each other."""
        try:
            await self._recover(home)
        except LOST_OR_REFUSED as lost:
            logs.warning("recovery delayed", error=str(lost))
            return False
        return True

    async def _recover(self, home: str) -> None:
        run, shards = ServerRun(), shards_at(home, self._keys)
        redis = self._open(run)
        try:
            await redis.at(home).ping()
            if shards:
                await self._replies.reopen(redis, shards, self._lost)
                await self._dispatch.ask_again(redis, shards, self._lost)
        finally:
            await redis.aclose()
        # Only now do the gateway's own connections accept the new run, and `dispatch` goes on.
        self._run.agree(run.bound)
        lost = self._lost.intersection(shards)
        logs.info("going on with another run of redis", waiting=len(self._replies), reply_streams_lost=len(lost))
        self._lost -= lost
