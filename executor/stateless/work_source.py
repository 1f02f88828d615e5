"""An executor's end of one queue of stateless work: calls share round trips, and waiting needs no polling.

Every call may be sent twice, so calls that were lost with a connection are simply sent again, in order. Calls made in
the same turn of the event loop leave in one write: an instance's answers go together with the next pull.

An idle executor waits for the queue's wake-up token with a blocking pop. Redis gives the token to one of the executors
that wait. The pop stays open when a timed wait ends. If the token comes when no instance here is idle any more, it is
passed on. After a while without requests the queue dozes (`executor.stateless.dozing`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from executor.connections import RETRY_DELAY_S, RedisConnections
from executor.stateless.dozing import Dozing
from executor.workers.carrier import Carrier
from shared.contract.ids import ExecutorId
from shared.process import logs
from shared.statistics.tally import ModelLoad
from shared.store.connections.link import Link, SharedLinks
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.keyspace import Keyspace, WorkKeys
from shared.store.reading import text_of, value_of
from shared.store.scripts import Scripts
from shared.store.work_scripts import Finished, Front, RequestId, Taken, WorkDone, WorkHeld, WorkScripts

WAKE_BLOCK_S = 1
"""An idle executor pulls at least this often, because an executor may have died with the wake-up token."""
VAIN_POPS_MAX = 30
"""After so many pops in a row without a token a queue dozes: its requests are rare enough to share a connection."""


class WorkSource:
    """The queue of one load of a model version, for one executor. queue: its keys"""

    def __init__(self, load: ModelLoad, executor: ExecutorId, connections: RedisConnections, dozing: Dozing) -> None:
        self._load = load
        self._executor = executor
        self._work = WorkScripts(connections.keys)
        self.queue = connections.keys.work_queue(load.model, load.version)
        self._carrier = Carrier(connections.scripts, connections.links, f"work of {load.model}")
        self._blocking = Link(connections.blocking.home(self.queue.wake))
        self._dozing = dozing
        # A new load has no requests: it dozes.
        self._vain_pops = VAIN_POPS_MAX
        self._takes = 0
        self._nonce = secrets.token_hex(4)
        self._armed = asyncio.Event()
        self._woken = asyncio.Event()
        self._listening = False
        self._waiting = False

    async def run(self) -> None:
        """Carries calls and wake-ups, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carrier.run(), name=f"{self._load.model} calls")
            group.create_task(self._listen(), name=f"{self._load.model} wake-ups")

    def pull(self, *, requests_max: int, rows_max: int, delay_us: int, take: int) -> asyncio.Future[Taken | Front]:
        """Takes the front of the queue, or reads it (see `WorkScripts.pull`)."""
        return self._carrier.send(
            self._work.pull(
                self._load,
                self._executor,
                self._tag(),
                requests_max=requests_max,
                rows_max=rows_max,
                delay_us=delay_us,
                take=take,
            )
        )

    def take(self, ids: Sequence[RequestId]) -> asyncio.Future[tuple[tuple[RequestId, bytes], ...]]:
        """Takes these requests; empty if another executor has taken one of them."""
        return self._carrier.send(self._work.take(self._load, self._executor, self._tag(), ids))

    def read(self, ids: Sequence[RequestId]) -> asyncio.Future[tuple[tuple[RequestId, bytes], ...]]:
        """Messages of waiting requests."""
        return self._carrier.send(self._work.read(self._load, ids))

    def finish(self, done: Sequence[WorkDone], execution: bytes = b"") -> asyncio.Future[Finished]:
        """Answers requests that this executor holds."""
        return self._carrier.send(self._work.finish(self._load, self._executor, done, execution=execution))

    def answers(
        self, requests: Sequence[tuple[RequestId, Sequence[tuple[int, bytes]]]]
    ) -> asyncio.Future[list[WorkHeld]]:
        """Writes answers of requests that this executor holds, but not their last ones."""
        return self._carrier.send(self._work.answers(self._load, self._executor, requests))

    def hand_back(self) -> asyncio.Future[int]:
        """Puts the requests back that this executor holds, because it leaves."""
        return self._carrier.send(self._work.requeue(self._load, self._executor))

    def take_from(self, dead: ExecutorId, *, given_up: bytes) -> asyncio.Future[int]:
        """Puts the requests back that a dead executor held. given_up: answer of requests that have lost too many
        executors
        """
        return self._carrier.send(self._work.requeue(self._load, dead, given_up=given_up))

    async def wait(self, delay_s: float | None = None) -> None:
        """Returns when there may be something to take, or after the delay."""
        self._waiting = True
        # The pop of an earlier, timed wait may still be open.
        if not self._listening:
            self._armed.set()
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self._waiting = False
            self._woken.clear()

    def _tag(self) -> str:
        # The nonce: after a reload the executor's id is the same, and a take must not look like one of the old load.
        self._takes += 1
        return f"{self._nonce}.{self._takes}"

    async def _listen(self) -> None:
        try:
            while True:
                await self._armed.wait()
                self._armed.clear()
                self._listening = True
                token = await self._pop()
                self._listening = False
                if self._waiting:
                    self._woken.set()
                # No instance here is idle any more: the token is for another executor.
                elif token:
                    self._carrier.send(self._work.wake(self._load))
        finally:
            await self._blocking.close()

    async def _pop(self) -> bool:
        """Waits for the wake-up token. False if it did not come, but there may be something to take."""
        if self._vain_pops >= VAIN_POPS_MAX:
            await self._blocking.close()
            self._vain_pops = 0
            return await self._dozing.doze(self.queue)
        try:
            await self._blocking.connect()
            (popped,) = await self._blocking.ask([("BLPOP", self.queue.wake, WAKE_BLOCK_S)], blocking_s=WAKE_BLOCK_S)
        except LOST_OR_REFUSED as error:
            logs.warning("wake-ups delayed", queue=self._load.model, cause=str(error))
            await asyncio.sleep(RETRY_DELAY_S)
            return False
        self._vain_pops = self._vain_pops + 1 if popped is None else 0
        return popped is not None


async def takers_of(links: SharedLinks, queues: Sequence[WorkKeys]) -> list[set[ExecutorId]]:
    """Of each queue the executors that may hold requests of it. Names that are no text, and so no executor's, are
    removed.
    """
    found = await links.ask([("HKEYS", queue.takers) for queue in queues])
    takers: list[set[ExecutorId]] = []
    foreign: list[tuple[Any, ...]] = []
    for queue, names in zip(queues, found, strict=True):
        texts = {name: value_of(queue.takers, name, bytes.decode, field=text_of(name)) for name in names}
        takers.append({ExecutorId(text) for text in texts.values() if text is not None})
        foreign += (("HDEL", queue.takers, name) for name, text in texts.items() if text is None)
    if foreign:
        await links.ask(foreign)
    return takers


async def refuse_waiting(
    links: SharedLinks, scripts: Scripts, keys: Keyspace, load: ModelLoad, reply: bytes, *, alive: AbstractSet[str]
) -> None:
    """Answers everything in a queue that no executor serves any more, also what dead executors held. reply: encoded"""
    work = WorkScripts(keys)
    (takers,) = await takers_of(links, [keys.work_queue(load.model, load.version)])
    for holder in sorted(takers - alive):
        await scripts.run(work.requeue(load, holder))
    while await scripts.run(work.refuse(load, reply)):
        logs.info("requests to an unloaded model refused", model=load.model, version=load.version)
