"""What the leaders of a scheduler share: one Redis, and how they see the executors in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from scheduler.ingest import Poll
from shared.contract.ids import ExecutorId, ShardId
from shared.store.commands import Redis
from shared.store.connections.homes import out_of_reach
from shared.store.connections.link import SharedLinks
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.scripts import Scripts
from shared.traces.tracing import Tracing


class Polls:
    """The executors: one poll at a time, for all loops and leaders of a scheduler.

    What a poll costs grows with the number of models. So leaders that rebuild at the same moment share a poll.

    latest  what the last poll brought
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._polling = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._now_ms = 0
        self.latest = Poll(())

    async def next(self) -> tuple[Poll, int]:
        """A poll that begins after this call, and the clock of Redis then, ms. Calls that come while another poll is
        under way share the next one. While no executor changes, every poll is the same object.

        Raises one of `redis_py.CONNECTION_LOST`.
        """
        wanted = self._begun + 1
        async with self._polling:
            if self._ended < wanted:
                self._begun = number = self._begun + 1
                members, self._now_ms = await self._membership.look()
                if members != self.latest.members:
                    self.latest = Poll(members)
                self._ended = number
            return self.latest, self._now_ms


class Reach:
    """Which shards can be reached: one look at a time, for all leaders of a scheduler. A silent server is waited for
    once, and not by each of hundreds.
    """

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._looking = asyncio.Lock()
        self._looks = 0
        self._seen: Mapping[ShardId, Exception] | Exception = {}

    async def lost(self) -> Mapping[ShardId, Exception]:
        """What the look that is under way finds, or else another one: as `homes.out_of_reach`."""
        before = self._looks
        async with self._looking:
            if self._looks == before:
                try:
                    self._seen = await out_of_reach(self._redis, self._keys)
                except CONNECTION_LOST as all_lost:
                    self._seen = all_lost
                self._looks += 1
            if isinstance(self._seen, Exception):
                raise self._seen
            return self._seen


class MeshAccess:
    """One Redis with its keys and scripts, and what all leaders of a scheduler share of it. Its client is made without
    retries.

    undrained      executors whose inboxes may hold steps of sequences that were taken from them
    run            that its connections are bound to; None: they are bound to none
    is_of_servers  whether it is a Cluster: several servers, one of which may be away
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keyspace,
        scripts: Scripts,
        membership: Membership,
        tracing: Tracing,
        run: ServerRun | None = None,
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.scripts = scripts
        self.membership = membership
        self.tracing = tracing
        self.run = run or ServerRun()
        self.is_of_servers = len(redis.apart(keys.bases())) > 1
        self.undrained = set[ExecutorId]()
        self._drain_due = asyncio.Event()
        self.links = SharedLinks(redis)
        self.polls = Polls(membership)
        self.reach = Reach(redis, keys)

    def drain_soon(self, executors: Iterable[ExecutorId]) -> None:
        """Has what does not belong in these executors' inboxes any more moved on, once for all leaders and beside them.

        An inbox holds the steps of all models, and very many of them where steps are kept for a replay. Whoever needs
        one that has not been moved on waits for it.
        """
        self.undrained.update(executors)
        if self.undrained:
            self._drain_due.set()

    async def to_be_drained(self) -> set[ExecutorId]:
        """Waits for such executors, and takes them."""
        await self._drain_due.wait()
        self._drain_due.clear()
        taken, self.undrained = self.undrained, set[ExecutorId]()
        return taken
