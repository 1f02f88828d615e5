"""The list of a mesh's keys, made of `shared.store.keyspace`: a key that is new there is in it by construction."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from shared.store.keyspace import Keyspace

NO_KEYS = {"base", "home_shard", "shard_ids", "shard_of"}
"""Public methods of a keyspace that are no keys; `.._prefix` and `.._base` neither."""


def every_key(keys: Keyspace, arguments: Mapping[str, Any]) -> Iterator[str]:
    """The keys of each of a keyspace's methods. arguments: by the names of the methods' parameters."""
    for name in dir(Keyspace):
        if name.startswith("_") or name in NO_KEYS or name.endswith(("_prefix", "_base")):
            continue
        made: Any = getattr(keys, name)
        if callable(made):
            made = made(*(arguments[each] for each in inspect.signature(made).parameters))
        yield from made if isinstance(made, tuple) else (made,)
