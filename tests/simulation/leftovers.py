"""What must not be left in the store when every sequence is over: no slot, no step, no state, nothing without a TTL."""

from __future__ import annotations

from shared.store.keyspace import kind_of
from tests.keys_page import PERMANENT
from tests.simulation.store import Store
from tests.simulation.values import Stream

EMPTY = ("starts", "feed", "inbox")
"""Streams that stay, with nothing in them."""


def leftovers(store: Store) -> list[str]:
    """What is there and should not be, in words."""
    problems: list[str] = []
    for raw in store.present():
        key = raw.decode()
        value = store.value(raw)
        kind = kind_of(key)
        if kind in EMPTY and isinstance(value, Stream) and len(value):
            entries = [b" ".join(fields[:6]).decode(errors="replace") for fields in value.fields.values()]
            problems.append(f"{len(value)} entries are left in {key}: {entries[:3]}")
        elif kind not in PERMANENT | {"inbox"} and store.ttl_ms(raw) == -1:
            problems.append(f"{key} is left for ever")
    return problems
