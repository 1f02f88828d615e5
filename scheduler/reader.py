"""One blocking read over the streams of every model that this scheduler leads, on a connection of its own.

Streams are only read here; entries go to their leader, which also knows from where to read on. A leader that is
replaced takes its places in the streams with it: what was read for it is lost with it, and read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from scheduler.leader import Leader
from shared.link import Link

ENTRIES_PER_STREAM = 512
"""Most entries of one stream in one read."""


class StreamReader:
    """Reads for all leaders at once."""

    def __init__(self, redis: Redis) -> None:
        self._link = Link(redis)

    async def read(self, leaders: Iterable[Leader], *, block_ms: int) -> bool:
        """Waits for entries, for at most `block_ms`, and delivers them; False at once when there is nothing to read.

        Raises one of `redis_client.CONNECTION_LOST`; the next read then begins where this one did.
        """
        owners: dict[str, Leader] = {}
        places: list[str] = []
        for leader in leaders:
            for stream, last in leader.positions().items():
                owners[stream] = leader
                places.append(last)
        if not owners:
            return False
        await self._link.connect()
        command = ("XREAD", "COUNT", ENTRIES_PER_STREAM, "BLOCK", block_ms, "STREAMS", *owners, *places)
        (reply,) = await self._link.exchange([command], blocking_s=block_ms / 1000)
        if isinstance(reply, Exception):
            raise reply
        for stream, entries in reply or ():
            name = stream.decode()
            owners[name].deliver(name, [(entry, _fields(flat)) for entry, flat in entries])
        return True

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()


def _fields(flat: list[Any]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
