"""One blocking read over the streams of every model that this scheduler leads, on a connection of its own.

Streams are only read here; entries go to their leader, which also knows from where to read on. A leader that is
replaced takes its places in the streams with it: what was read for it is lost with it, and read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from scheduler.leader import Leader
from shared.store.link import Link

ENTRIES_PER_STREAM = 512
"""Most entries of one stream in one read."""
BLOCK_MS = 1000
"""How long a read waits for entries when it is for every leader."""


class StreamReader:
    """Reads for all leaders at once."""

    def __init__(self, redis: Redis) -> None:
        self._link = Link(redis)
        self._reading: asyncio.Timeout | None = None

    async def read(self, leaders: Iterable[Leader], *, tick_ms: int) -> bool:
        """Waits for entries and delivers them; False at once when there is nothing to read.

        tick_ms  for how long it waits at most while some leader is not ready to be read for
        Raises one of `redis_client.CONNECTION_LOST`; the next read then begins where this one did.
        """
        owners: dict[str, Leader] = {}
        places: list[str] = []
        block_ms = BLOCK_MS
        for leader in leaders:
            positions = leader.positions()
            if not positions:
                block_ms = min(block_ms, tick_ms)
            for stream, last in positions.items():
                owners[stream] = leader
                places.append(last)
        if not owners:
            return False
        command = ("XREAD", "COUNT", ENTRIES_PER_STREAM, "BLOCK", block_ms, "STREAMS", *owners, *places)
        self._reading = reading = asyncio.timeout(None)
        try:
            async with reading:
                await self._link.connect()
                (reply,) = await self._link.exchange([command], blocking_s=block_ms / 1000)
        except TimeoutError:
            if not reading.expired():
                raise
            return True
        finally:
            self._reading = None
        if isinstance(reply, Exception):
            raise reply
        for stream, entries in reply or ():
            name = stream.decode()
            owners[name].deliver(name, [(entry, _fields(flat)) for entry, flat in entries])
        return True

    def look_again(self) -> None:
        """There is another leader: the read that is under way, which knows nothing of it, ends now."""
        if self._reading is not None:
            self._reading.reschedule(0)
            self._reading = None

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()


def _fields(flat: list[Any]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
