"""Asks Sentinels which server is the primary now (`shared.store.connections.discovery`).

redis-py's own Sentinel client asks one after the other, believes the first, and fails if that one answers nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.store.connections.discovery import Discovery, NoAnswerError, Primary

DOWN = {"s_down", "o_down"}
"""Flags of a primary that is about to be replaced."""


def sentinels(service: str, connections: Sequence[Callable[[], Any]]) -> Discovery:
    """The Sentinels of one service (a primary with its replicas, under the name that the Sentinels have for them).

    connections  for each Sentinel, a function that makes a connection to it, not yet connected
    """
    return Discovery(
        f"no Sentinel tells of a primary '{service}'",
        lambda: (make() for make in connections),
        ("SENTINEL", "MASTER", service),
        lambda reply, _: primary_of(reply),
    )


def primary_of(reply: Any) -> Primary:
    """The reply to SENTINEL MASTER. Raises NoAnswerError."""
    try:
        fields = dict(zip(map(bytes.decode, reply[::2]), map(bytes.decode, reply[1::2]), strict=True))
        primary = Primary(fields["ip"], int(fields["port"]), int(fields["config-epoch"]))
        flags = set(fields["flags"].split(","))
    except (TypeError, ValueError, KeyError) as nonsense:
        raise NoAnswerError("its answer is not a Sentinel's") from nonsense
    if not primary.host or not 0 < primary.port < 1 << 16:
        raise NoAnswerError("its answer names no server")
    if "master" not in flags or flags & DOWN:
        raise NoAnswerError(f"{primary.host}:{primary.port} is down ({fields['flags']})")
    return primary
