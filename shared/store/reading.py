"""The one rule for values in Redis that cannot be read: such a value affects its own sequence, model, member or request
only.

A reader decodes a value by `value_of`, or inside a `try` for `FAILURES`. A value that cannot be decoded is counted and
logged once (`noted`), and is answered with an error or left out. It never ends a loop.

    a field that is not known    it belongs to a newer release: ignored, everywhere
    a value                      left out by its reader; its sequence is lost, or its request is answered INTERNAL
    a key of another type        removed, and treated as empty (`shared.store.connections.mending`, and common.lua)

Unreadable values are counted in Redis by kind, for metrics and operators (`keyspace.unreadable`). Scripts count by
themselves, services every second (`tell`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from shared.process import logs
from shared.store.commands import Redis
from shared.store.intervals import at_intervals
from shared.store.keyspace import TYPES, Keyspace, kind_of

FAILURES = (msgspec.MsgspecError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
"""Exceptions that decoding a value may raise."""
NAMES_MAX = 1024
"""Names that are remembered, so that each is logged once; beyond that, the oldest are forgotten."""
NAME_LENGTH_MAX = 512
TELL_INTERVAL_S = 1.0
COUNT_DIGITS = 19
"""Of the first count that Redis may have no room for."""
LAST = "last:"
"""Prefix, before the kind, of the field of `keyspace.unreadable` that holds the last name."""

REMEDIES = {
    "seq": "the sequence is lost: its client begins anew with START",
    "checkpoint": "the sequence is lost: its client begins anew with START",
    "parked": "the step is answered INTERNAL: its client sends it again",
    "inbox": "the step is answered INTERNAL: its client sends it again",
    "work:messages": "the request is answered INTERNAL: its client sends it again",
    "executors": "none: the executor registers anew; until then its sequences go on elsewhere",
    "models": "none: an executor that serves the model publishes it again",
    "settings": "set it again by the logging or trace extension; until then the default holds",
    "tenants": "set the tenant's limits again: `seqmesh tenants set`; until then those of '*' hold",
    "wanted": "load or unload the model again",
    "kept": "load or unload the model again",
    "mesh": "stop the mesh and remove the key, or use another SEQMESH_KEY_PREFIX",
}
"""Advice for the operator, by kind of key."""
LEFT_OUT = "none: it was left out. Look for what else writes to this Redis, under this prefix"

T = TypeVar("T")


class Found:
    """The unreadable values that this process has found. One object per process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        self.names: dict[str, None] = {}


found = Found()


def noted(key: str, cause: object, *, field: str = "") -> None:
    """Counts a value that cannot be read, and logs it the first time."""
    kind, name = kind_of(key), (f"{key} {field}" if field else key)[:NAME_LENGTH_MAX]
    found.counts[kind] += 1
    found.last[kind] = name
    if name in found.names:
        return
    found.names[name] = None
    if len(found.names) > NAMES_MAX:
        del found.names[next(iter(found.names))]
    remedy = REMEDIES.get(kind, LEFT_OUT)
    logs.error("value unreadable", key=name, kind=kind, cause=str(cause)[:NAME_LENGTH_MAX], remedy=remedy)


def value_of(key: str, data: T, decode: Callable[[T], Any], *, field: str = "") -> Any:
    """Decodes a value; None if it cannot be read. decode: raises one of `FAILURES`"""
    try:
        return decode(data)
    except FAILURES as failure:
        noted(key, failure, field=field)
        return None


def counter(data: bytes) -> int:
    """A number that Redis can count, within 64 bits. Raises ValueError for any other."""
    if not -(1 << 63) <= (count := int(data)) < 1 << 63:
        raise ValueError(f"a count of {len(data)} digits")
    return count


def clock_ms(reply: Sequence[Any]) -> int:
    """The clock of Redis, ms. reply: that to TIME, seconds and microseconds"""
    seconds, microseconds = reply
    return int(seconds) * 1000 + int(microseconds) // 1000


def text_of(name: bytes) -> str:
    """A name as text that can be shown."""
    return name.decode(errors="backslashreplace")


async def tell(redis: Redis, keys: Keyspace) -> None:
    """Adds this process's counts to the mesh's, every second, for ever."""
    await at_intervals(
        TELL_INTERVAL_S, lambda: tell_now(redis, keys), "unreadable values not counted yet", log=logs.debug
    )


async def tell_now(redis: Redis, keys: Keyspace) -> None:
    """Adds the counts once. Raises what redis-py raises; the counts are kept then."""
    if not found.counts:
        return
    told, last = Counter(found.counts), dict(found.last)
    pipe = redis.pipeline(transaction=True)
    for kind, count in told.items():
        pipe.hincrby(keys.unreadable(None), kind, count)
        pipe.hset(keys.unreadable(None), f"{LAST}{kind}", last[kind])
    await pipe.execute()
    # Only what was sent: more may have been found during the call.
    found.counts -= told
    found.last = {kind: name for kind, name in found.last.items() if kind in found.counts}


async def read_counts(redis: Redis, keys: Keyspace) -> Counter[str]:
    """How many values the whole mesh could not read so far, by kind. Raises what redis-py raises."""
    pipe = redis.pipeline(transaction=False)
    for shard in (None, *keys.shards):
        pipe.hgetall(keys.unreadable(shard))
    sums: Counter[str] = Counter()
    for fields in await pipe.execute():
        for kind, count in fields.items():
            # What cannot be read here is not counted here.
            if (name := text_of(kind)) in TYPES and count.isdigit() and len(count) < COUNT_DIGITS:
                sums[name] += int(count)
    return sums
