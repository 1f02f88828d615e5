"""What was lost with a key that could not be read, and held what is many sequences': made again from their records.

A key of another type is removed by whoever meets it (`shared.store.mending`, common.lua): an inbox with the steps on
their way, the list of who waits or who owns what, the times at which to look for idle sequences. The records know all
of it but the steps. So a scheduler watches the counts of such keys; when one has grown, the leaders look over every
sequence of their models (`sweep.lua`), and begin anew from Redis.
"""

from __future__ import annotations

import time
from typing import Any, cast

from redis.asyncio import Redis

from scheduler.effects import MeshAccess
from shared.contract.ids import SequenceId, Term
from shared.contract.limits import SCRIPT_STEPS_MAX
from shared.process import logs
from shared.store.keyspace import Keyspace
from shared.store.reading import read_counts, text_of

SHARED_BY_SEQUENCES = ("starts", "feed", "inbox", "owned", "deadlines", "parked")
"""Kinds of keys that can be made again from the records, or without which steps are missing."""
PAUSE_S = 5.0
"""Between two sweeps: each goes over every key of the mesh."""
KEYS_PER_SCAN = 1000


class SpoiltKeys:
    """Watches the counts."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._seen: dict[str, int] | None = None
        self._looked_at = 0.0

    async def found(self) -> bool:
        """Whether any was removed since this was said last. Raises one of `CONNECTION_LOST`."""
        if time.monotonic() - self._looked_at < PAUSE_S:
            return False
        counts = await read_counts(self._redis, self._keys)
        before, self._seen = self._seen, {kind: counts[kind] for kind in SHARED_BY_SEQUENCES}
        self._looked_at = time.monotonic()
        return before is not None and before != self._seen


async def sweep(mesh: MeshAccess, model: str, term: Term) -> None:
    """Looks over every sequence of a model. Raises ResponseError FENCED, one of `CONNECTION_LOST`."""
    looked_at = 0
    for shard in mesh.keys.shard_ids():
        prefix = f"{mesh.keys.base(shard)}seq:"
        found = cast("Any", mesh.redis).scan_iter(match=f"{escaped(prefix + model)}|*", count=KEYS_PER_SCAN)
        sequences = [SequenceId(text_of(key).removeprefix(prefix)) async for key in found]
        for begin in range(0, len(sequences), SCRIPT_STEPS_MAX):
            chunk = sequences[begin : begin + SCRIPT_STEPS_MAX]
            looked_at += sum(await mesh.scripts.run(mesh.scripts.sweep(chunk, shard=shard, model=model, term=term)))
    logs.warning("sequences looked over after keys were unreadable", model=model, sequences=looked_at)


def escaped(text: str) -> str:
    """A text as a pattern for itself."""
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)
