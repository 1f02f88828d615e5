"""Blocking reads over the streams of the models that this scheduler leads.

A read that waits is sent anew with each entry that ends it, and names every one of its streams. So one reader serves a
few leaders only: what an entry costs does not grow with the number of models.

The entries are delivered to their leader, which keeps the positions in its streams. A leader that is replaced takes
its positions with it: the new leader reads the streams from their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.leader import Leader
from shared.store.commands import Redis
from shared.store.connections.link import Link, streams_read

LEADERS_MAX = 8
"""Leaders whose streams are read together. A stream costs Redis half a us a read, a reader costs a connection."""
ENTRIES_PER_STREAM = 512
"""Entries of one stream that one read returns at most."""
BLOCK_MS = 1000
"""How long a read waits for entries when every leader can be read for."""


class StreamReader:
    """Reads those streams of its leaders together that one server holds, on a connection of its own."""

    def __init__(self, server: Redis) -> None:
        self._link = Link(server)
        self._leaders: dict[Leader, frozenset[str]] = {}
        self._is_fed = False

    @property
    def has_room(self) -> bool:
        """Whether it can read for one leader more."""
        return len(self._leaders) < LEADERS_MAX

    def add(self, leader: Leader, streams: Iterable[str]) -> None:
        """Reads these of the leader's streams too, from now on."""
        self._leaders[leader] = frozenset(streams)
        self.look_again()

    def look_again(self) -> None:
        """Ends the wait that is under way: its leaders may wait for more by now."""
        self._link.cut_short()

    def drop(self, leader: Leader) -> None:
        del self._leaders[leader]

    async def read(self, *, tick_ms: int) -> bool:
        """Waits for entries and delivers them.

        tick_ms  how long to wait at most while a leader is not ready to be read for, or at ease
        returns  False at once when there is no stream to be read
        raises   one of `redis_py.CONNECTION_LOST`; the next read then begins where this one did
        """
        owners: dict[str, Leader] = {}
        last_read: dict[str, str] = {}
        awaited: dict[str, str] = {}
        block_ms = BLOCK_MS
        for leader, streams in self._leaders.items():
            positions = {stream: last for stream, last in leader.positions().items() if stream in streams}
            if not positions:
                block_ms = min(block_ms, tick_ms)
            last_read |= positions
            owners |= dict.fromkeys(positions, leader)
            awaited |= leader.awaited(positions)
        if not owners:
            return False
        if len(awaited) < len(last_read):
            # Only a sequence that asks for a slot is worth being woken for. What it brings is read with all the rest.
            block_ms = min(block_ms, tick_ms if self._is_fed else BLOCK_MS)
            await self._link.wait(_reading(awaited, block_ms), blocking_s=block_ms / 1000)
            block_ms = 0
        found = streams_read(await self._link.wait(_reading(last_read, block_ms), blocking_s=block_ms / 1000))
        self._is_fed = bool(found)
        for stream, entries in found:
            name = stream.decode()
            owners[name].deliver(name, [(entry, _fields(flat)) for entry, flat in entries])
        return True

    async def close(self) -> None:
        await self._link.close()


def _reading(positions: Mapping[str, str], block_ms: int) -> Sequence[Any]:
    """block_ms: 0 reads what is there"""
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREAD", "COUNT", ENTRIES_PER_STREAM, *block, "STREAMS", *positions, *positions.values())


def _fields(flat: list[Any]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
