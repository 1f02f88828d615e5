"""The list of a mesh's keys, made of `shared.store.keyspace`: a key that is new there is in it by construction."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from shared.store.keyspace import Keyspace

NO_KEYS = {"prefix", "shards", "base", "bases", "home_shard", "shard_of", "records"}
"""Public attributes and methods of a keyspace that are no keys, or no others than `sequence`."""


def every_key(keys: Keyspace, arguments: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a keyspace names. arguments: by the names of its methods' parameters."""
    for name in dir(keys):
        if name.startswith("_") or name in NO_KEYS:
            continue
        made: Any = getattr(keys, name)
        if callable(made):
            made = made(*(arguments[each] for each in inspect.signature(made).parameters))
        yield from made if isinstance(made, tuple) else (made,)
