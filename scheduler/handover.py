"""What a leader leaves to the next one of this scheduler: without it nobody leads while a node of a Cluster is away.

A leader reads in Redis which sequences hold which slots. Of a shard whose node cannot be reached it cannot. Then what
the leader before knew of that shard still tells which slots its sequences may hold (`scheduler.core.away`), provided
that nobody has led in between: the terms of a model are counted, so the next term tells.
"""

from __future__ import annotations

from scheduler.core.away import Lent
from scheduler.leader import Leader
from shared.contract.ids import Term
from shared.store.commands import Redis
from shared.store.homes import out_of_reach
from shared.store.keyspace import Keyspace


class Handovers:
    """What the last leaders of this scheduler knew, by model."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._left: dict[str, tuple[Term, Lent]] = {}

    def leave(self, leader: Leader) -> None:
        """A leader has ended: what it knew is kept for the next one."""
        # Without the only server nobody leads anyway.
        known = leader.known if len(self._redis.apart(self._keys.bases())) > 1 else None
        if known is None:
            self.forget(leader.model)
        elif leader.term >= self._left.get(leader.model, (0, None))[0]:
            self._left[leader.model] = leader.term, known

    def begin(self, model: str, term: Term) -> Lent | None:
        """A leader begins. Returns what the one before knew; None if nobody has led here, or another scheduler may have
        led since.
        """
        before, known = self._left.pop(model, (Term(0), None))
        if known is None or term - before > 1:
            return None
        self._left[model] = term, known
        return known

    def forget(self, model: str) -> None:
        """What was known of a model contradicts itself."""
        self._left.pop(model, None)

    def clear(self) -> None:
        """A server may have lost what leaders were told, or the terms that were given."""
        self._left.clear()

    async def away(self, known: Lent | None) -> Lent:
        """The shards to lead without, and the slots that they may hold. Raises one of CONNECTION_LOST if one of them is
        not known, or if all are away.
        """
        lost = await out_of_reach(self._redis, self._keys)
        if known is None and lost:
            raise next(iter(lost.values()))
        return {shard: known[shard] for shard in lost} if known is not None else {}
