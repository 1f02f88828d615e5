"""One Redis as a scheduler's leaders use it."""

from __future__ import annotations

from scheduler.polls import Polls
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.link import SharedLinks
from shared.store.membership import Membership
from shared.store.scripts import Scripts
from shared.traces.tracing import Tracing


class MeshAccess:
    """One Redis with its keys and scripts, and what all leaders of a scheduler share of it. Its client is made without
    retries.
    """

    def __init__(
        self, redis: Redis, keys: Keyspace, scripts: Scripts, membership: Membership, tracing: Tracing
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.scripts = scripts
        self.membership = membership
        self.tracing = tracing
        self.links = SharedLinks(redis)
        self.polls = Polls(membership)
