"""Goes over to another run of the Redis server, after a restart or a failover.

The gateway's connections are bound to one run: they refuse to talk to another one until `ServerRun.agree`. So nothing
new reaches the new run before the requests that the old one had accepted were checked against it, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.exceptions import OutOfMemoryError

from gateway.requests.dispatch import Dispatch
from gateway.requests.replies import Replies
from shared.contract.ids import ShardId
from shared.process import logs
from shared.store.commands import Redis
from shared.store.redis_client import CONNECTION_LOST, pause_s
from shared.store.server_run import ServerRun


class RestartRecovery:
    """The task that goes over. open_client: makes a client whose connections are bound to a run."""

    def __init__(
        self, open_client: Callable[[ServerRun], Redis], run: ServerRun, replies: Replies, dispatch: Dispatch
    ) -> None:
        self._open = open_client
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
            try:
                await self._recover()
                failures = 0
            except (*CONNECTION_LOST, OutOfMemoryError) as lost:
                failures += 1
                logs.warning("recovery delayed", error=str(lost))
                await asyncio.sleep(pause_s(failures))

    async def _recover(self) -> None:
        run = ServerRun()
        redis = self._open(run)
        try:
            await redis.ping()
            await self._replies.reopen(redis, self._lost)
            await self._dispatch.ask_again(redis, self._lost)
        finally:
            await redis.aclose()
        # Only now do the gateway's own connections accept the new run, and `dispatch` goes on.
        self._run.agree(run.bound)
        logs.info("going on with another run of redis", waiting=len(self._replies), reply_streams_lost=len(self._lost))
        self._lost.clear()
