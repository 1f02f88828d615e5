"""Finds keys that would stay in Redis for ever: no TTL, and of no kind that docs/reference/keys.md calls permanent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from shared.store.keyspace import kind_of
from shared.store.libraries import library
from tests.keys_page import PERMANENT, SEQUENCE_BOUND


class Keys(Protocol):
    """What of a client is needed to look at keys; redis-py types its commands for both of its worlds."""

    def scan_iter(self, match: str, count: int) -> Iterator[Any]: ...
    def ttl(self, name: bytes) -> Any: ...
    def type(self, name: bytes) -> Any: ...
    def unlink(self, *names: bytes) -> Any: ...


def leaked_keys(client: Keys, prefix: str, *, sequences_may_live: bool = False) -> list[str]:
    """Keys under `prefix` without TTL that are of no permanent kind, sorted, each with its type.

    sequences_may_live  the keys of sequences that neither ended nor expired are no leak
    """
    allowed = PERMANENT | SEQUENCE_BOUND if sequences_may_live else PERMANENT
    leaked: list[str] = []
    for raw in keys_under(client, prefix):
        key = raw.decode(errors="replace")
        # -1: exists without TTL. -2: gone since the scan saw it.
        if client.ttl(raw) == -1 and kind_of(key) not in allowed:
            leaked.append(f"{key} ({client.type(raw).decode()})")
    return sorted(leaked)


def remove_keys(client: Keys, prefix: str) -> None:
    """Removes every key under `prefix`."""
    for key in keys_under(client, prefix):
        client.unlink(key)


def remove_libraries(client: Any, prefix: str) -> None:
    """Removes the scripts of the mesh of that prefix, which would slow down those of the tests that follow."""
    for _, name, *_ in client.function_list(f"{library(prefix).of_mesh}*"):
        client.function_delete(name.decode())


def keys_under(client: Keys, prefix: str) -> list[bytes]:
    """Every key of one test."""
    return list(client.scan_iter(match=f"{prefix}:*", count=1000))
