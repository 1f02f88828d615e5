"""The inboxes of one executor registration, one per shard. Those of one server are read together.

Entries stay in Redis until their effect is final. So a position only says where to read on: reading again from the
beginning brings everything once more that is not finished.

A read asks for no more entries than bring READ_BYTES, if they are as large as the largest entry of the read before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from executor.connections import RETRY_DELAY_S, RedisConnections
from shared.contract.ids import ExecutorId, ShardId, entry_key
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.link import Link, streams_read
from shared.store.connections.redis_py import LOST_OR_REFUSED

INBOX_BLOCK_MS = 1000
BEGINNING = "0-0"
READ_BYTES = 32 << 20
"""Most bytes that a read should bring."""
FIRST_COUNT = 16
"""Entries of the first read, when their size is unknown."""
COUNT_MAX = 512
"""Most entries of a shard that a read asks for."""
GROWTH = 4

LastEntries = Mapping[ShardId, str]
"""The last entry of each shard's inbox at one moment."""


ReadEntry = tuple[bytes, Sequence[bytes]]
"""An entry as it was read: its id, and its fields and their values in turn. What Redis sends is a list of the two, for
which Python has no type.
"""
Read = Mapping[str, Sequence[ReadEntry]]
"""What a read has brought, by the key of the inbox."""


class Inbox:
    """Reads every entry once, in the order of its shard, unless told to read again.

    parts  the inboxes of each server, which are read together
    """

    def __init__(self, connections: RedisConnections, executor: ExecutorId) -> None:
        self._redis = connections.commands
        self._names = {shard: connections.keys.inbox(shard, executor) for shard in connections.keys.shards}
        self.parts = [
            InboxPart(connections.blocking, names, executor)
            for names in connections.blocking.apart(self._names.values())
        ]

    def read_again(self) -> None:
        """Has every entry that is still in the inboxes read once more."""
        for part in self.parts:
            part.again = True

    async def remove(self, shard: ShardId, entries: Sequence[str]) -> None:
        """Removes entries. Raises one of `CONNECTION_LOST`."""
        await self._redis.xdel(self._names[shard], *entries)

    async def last_entries(self) -> LastEntries:
        """The last entries of the inboxes now. Raises one of `CONNECTION_LOST`."""
        pipe = self._redis.pipeline(transaction=False)
        for name in self._names.values():
            pipe.xrevrange(name, count=1)
        last = await pipe.execute()
        return {
            shard: entries[0][0].decode() if entries else BEGINNING
            for shard, entries in zip(self._names, last, strict=True)
        }

    def has_passed(self, last: LastEntries) -> bool:
        """Whether every entry up to these has been read."""
        positions = {name: position for part in self.parts for name, position in part.positions.items()}
        return not any(part.again for part in self.parts) and all(
            entry_key(positions[self._names[shard]]) >= entry_key(entry) for shard, entry in last.items()
        )


class InboxPart:
    """The inboxes that one server has.

    positions  the last entry of each that was taken in
    again      whether they are to be read once more from their beginning
    """

    def __init__(self, redis: Redis, names: Sequence[str], executor: ExecutorId) -> None:
        self._redis = redis.home(names[0])
        self.positions = dict.fromkeys(names, BEGINNING)
        self._executor = executor
        self._count = FIRST_COUNT
        self._done: dict[str, list[str]] = {name: [] for name in names}
        self.again = False

    def done(self, stream: str, entries: Sequence[str]) -> None:
        """Has entries of an inbox removed after the present read: nothing more is to be done for them."""
        self._done[stream] += entries

    async def reads(self) -> AsyncGenerator[Read]:
        """Reads for ever. When the next read is asked for, the last one has been taken in."""
        link = Link(self._redis)
        try:
            while True:
                try:
                    await link.connect()
                    read = await self._read(link)
                    if read:
                        yield read
                    await self._taken(link, read)
                except LOST_OR_REFUSED as error:
                    logs.warning("inbox reading delayed", executor=self._executor, cause=str(error))
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            await link.close()

    async def _read(self, link: Link) -> Read:
        """One blocking read of all inboxes."""
        if self.again:
            self.positions = dict.fromkeys(self.positions, BEGINNING)
            self._count = FIRST_COUNT
            self.again = False
        head = ("XREAD", "COUNT", self._count, "BLOCK", INBOX_BLOCK_MS, "STREAMS")
        command = (*head, *self.positions, *self.positions.values())
        (read,) = await link.ask([command], blocking_s=INBOX_BLOCK_MS / 1000)
        found: Read = {stream.decode(): entries for stream, entries in streams_read(read)}
        if found:
            largest = max(sum(map(len, flat)) for entries in found.values() for _, flat in entries)
            self._count = next_count(self._count, largest * len(self.positions))
        return found

    async def _taken(self, link: Link, read: Read) -> None:
        """Removes what is done. A position moves on only when the entries before it were taken in.

        A step leaves the inbox with its checkpoint, a control message as soon as it was taken in. Entries to be removed
        are remembered until Redis has removed them, because they may be named only once.
        """
        for name, entries in read.items():
            if done := self._done[name]:
                await link.ask([("XDEL", name, *done)])
                done.clear()
            # After the removal: if that fails, the same entries are read, and removed, again.
            self.positions[name] = entries[-1][0].decode()


def next_count(count: int, largest: int) -> int:
    """How many entries of each shard the next read asks for. count, largest: entries asked for, and bytes of the
    largest entry found, times the shards, in the read before
    """
    return max(1, min(COUNT_MAX, GROWTH * count, READ_BYTES // max(1, largest)))
