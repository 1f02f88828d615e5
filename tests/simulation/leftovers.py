"""What must not be left in the store when every sequence is over: no slot, no step, no state, nothing without a TTL."""

from __future__ import annotations

import fnmatch

from shared.store.keyspace import MESH, PERMANENT, SCHEMA_VERSION, Keyspace
from tests.simulation.store import Store
from tests.simulation.values import Stream

EMPTY = ("starts", "feed", "inbox")
"""Streams that stay, with nothing in them."""


def leftovers(store: Store, keys: Keyspace) -> list[str]:
    """What is there and should not be, in words."""
    problems: list[str] = []
    allowed = [f"{keys.prefix}:{SCHEMA_VERSION}:{pattern}" for pattern in (*PERMANENT, "*:inbox:*")]
    allowed.append(f"{keys.prefix}:{MESH}")
    for raw in store.present():
        key = raw.decode()
        value = store.value(raw)
        kind = key.split("}:", 1)[1].split(":", 1)[0]
        if kind in EMPTY and isinstance(value, Stream) and len(value):
            entries = [b" ".join(fields[:6]).decode(errors="replace") for fields in value.fields.values()]
            problems.append(f"{len(value)} entries are left in {key}: {entries[:3]}")
        elif (
            kind not in EMPTY and store.ttl_ms(raw) == -1 and not any(fnmatch.fnmatchcase(key, one) for one in allowed)
        ):
            problems.append(f"{key} is left for ever")
    return problems
