"""An operator's wish about one sequence: that it moves, that it pauses.

A wish is an entry in the starts stream of the sequence's model. So it reaches the model's present leader, or the next
one. The leader removes it when it has acted, or cannot act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from shared.contract.ids import SequenceId, model_of
from shared.store.commands import Redis, Value
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of

POLL_S = 0.05
NO_LEADER = "no scheduler leads its model now: try again"


class WishEntry(NamedTuple):
    """kind: of the entry (docs/reference/keys.md); fields: those behind the sequence"""

    kind: str
    fields: Mapping[str, Value]


async def uttered(redis: Redis, keys: Keyspace, sequence: SequenceId, wish: WishEntry) -> tuple[str, str]:
    """Tells the model's leader, and does not wait. Returns the stream and the entry of the wish."""
    starts = keys.starts(keys.shard_of(sequence), model_of(sequence))
    return starts, text_of(await redis.xadd(starts, {"k": wish.kind, "q": sequence, **wish.fields}))


async def fulfilled(redis: Redis, keys: Keyspace, sequence: SequenceId, wish: WishEntry, *, patience_s: float) -> bool:
    """Utters a wish, and waits until the leader has acted on it. False if no leader has."""
    starts, entry = await uttered(redis, keys, sequence, wish)
    try:
        async with asyncio.timeout(patience_s):
            while await redis.xrange(starts, entry, entry):  # noqa: ASYNC110 - the wish lies in Redis
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    finally:
        # It must not be fulfilled when nobody waits for it any more.
        await redis.xdel(starts, entry)
    return True
