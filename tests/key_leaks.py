"""Finds keys that would stay in Redis for ever: no TTL, and not in the list of permanent keys."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any, Protocol

from shared.store.keyspace import MESH, PERMANENT, SCHEMA_VERSION, SEQUENCE_BOUND


class Keys(Protocol):
    """What of a client is needed to look at keys; redis-py types its commands for both of its worlds."""

    def scan_iter(self, match: str, count: int) -> Iterator[Any]: ...
    def ttl(self, name: bytes) -> Any: ...
    def type(self, name: bytes) -> Any: ...
    def unlink(self, *names: bytes) -> Any: ...


def leaked_keys(client: Keys, prefix: str, *, sequences_may_live: bool = False) -> list[str]:
    """Keys under `prefix` without TTL that match no permanent pattern, sorted, each with its type.

    sequences_may_live  the keys of sequences that neither ended nor expired are no leak
    """
    allowed = PERMANENT + (SEQUENCE_BOUND if sequences_may_live else ())
    patterns = [f"{prefix}:{MESH}", *(f"{prefix}:{SCHEMA_VERSION}:{pattern}" for pattern in allowed)]
    leaked: list[str] = []
    for raw in keys_under(client, prefix):
        key = raw.decode(errors="replace")
        # -1: exists without TTL. -2: gone since the scan saw it.
        if client.ttl(raw) == -1 and not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
            leaked.append(f"{key} ({client.type(raw).decode()})")
    return sorted(leaked)


def remove_keys(client: Keys, prefix: str) -> None:
    """Removes every key under `prefix`."""
    for key in keys_under(client, prefix):
        client.unlink(key)


def keys_under(client: Keys, prefix: str) -> list[bytes]:
    """Every key of one test."""
    return list(client.scan_iter(match=f"{prefix}:*", count=1000))
