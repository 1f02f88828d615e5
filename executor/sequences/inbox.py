"""The inboxes of one executor registration, one per shard, read together.

Entries stay in Redis until their effect is final. So a position only says where to read on: reading again from the
beginning brings everything once more that is not finished.

Reads are bounded in bytes:
* A read asks for no more entries than bring READ_BYTES, if they are as large as the largest entry of the read before.
* While the requests that wait here take more than a bound, nothing is read, and the rest waits in Redis. But that holds
  only while any of these requests can run. After a takeover steps may come out of order, so the step that lets all the
  others run may be one that was not read yet.
* For the same reason, and because control messages come the same way, no pause is longer than PATIENCE_S, even if a
  model hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from redis.exceptions import ResponseError

from executor.connections import RETRY_DELAY_S, RedisConnections
from shared.contract.ids import ExecutorId, ShardId
from shared.process import logs
from shared.store.link import Link
from shared.store.reading import UnreadableError, note
from shared.store.redis_client import CONNECTION_LOST

INBOX_BLOCK_MS = 1000
BEGINNING = "0-0"
READ_BYTES = 32 << 20
"""Most bytes that a read should bring."""
FIRST_COUNT = 16
"""Entries of the first read, when their size is unknown."""
GROWTH = 4
PATIENCE_S = 5.0
"""Longest time without a read."""
ROOM_POLL_S = 0.01

Take = Callable[[str, bytes, Mapping[bytes, bytes]], Awaitable[Sequence[str]]]
"""Takes an entry in: (key of the stream, id, fields) -> the entries that may be removed now; the entry itself, if
nothing more is to be done for it. Raises UnreadableError for an entry that means nothing: it is removed.
"""


class Holder(Protocol):
    """Keeps the requests that were taken in until they are done."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the requests that wait for their turn, or run."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether any of these requests runs, or can run."""
        ...


Marks = Mapping[ShardId, str]
"""The last entry of each shard's inbox at one moment."""


class Inbox:
    """Reads every entry once, in the order of its shard, unless told to read again.

    count_max  entries of a shard per read
    bytes_max  bytes of the holder's requests beyond which nothing is read while they can run
    """

    def __init__(
        self,
        connections: RedisConnections,
        executor: ExecutorId,
        *,
        count_max: int,
        bytes_max: int,
        take: Take,
        holder: Holder,
    ) -> None:
        self._connections = connections
        self._names = {shard: connections.keys.inbox(shard, executor) for shard in connections.keys.shard_ids()}
        self._positions = dict.fromkeys(self._names.values(), BEGINNING)
        self._executor = executor
        self._count_max = count_max
        self._count = min(FIRST_COUNT, count_max)
        self._bytes_max = bytes_max
        self._holder = holder
        self._held_at_most = 0
        self._take = take
        self._done: dict[bytes, list[str]] = {}
        self._again = False

    def read_again(self) -> None:
        """Has every entry that is still in the inboxes read once more."""
        self._again = True

    async def remove(self, shard: ShardId, entries: Sequence[str]) -> None:
        """Removes entries. Raises one of `CONNECTION_LOST`."""
        await self._connections.commands.xdel(self._names[shard], *entries)

    async def marks(self) -> Marks:
        """The last entries of the inboxes now. Raises one of `CONNECTION_LOST`."""
        pipe = self._connections.commands.pipeline(transaction=False)
        for name in self._names.values():
            pipe.xrevrange(name, count=1)
        last = await pipe.execute()
        return {
            shard: entries[0][0].decode() if entries else BEGINNING
            for shard, entries in zip(self._names, last, strict=True)
        }

    def has_passed(self, marks: Marks) -> bool:
        """Whether every entry up to the marks has been read."""
        return not self._again and all(
            entry_key(self._positions[self._names[shard]]) >= entry_key(mark) for shard, mark in marks.items()
        )

    async def run(self) -> None:
        """Reads for ever."""
        link = Link(self._connections.blocking)
        try:
            while True:
                try:
                    await self._room()
                    await link.connect()
                    await self._read(link)
                except (*CONNECTION_LOST, ResponseError) as error:
                    logs.warning("inbox reading delayed", executor=self._executor, cause=str(error))
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            await link.close()

    async def _room(self) -> None:
        """Returns when the next read may begin (see the module)."""
        if self._held_at_most <= self._bytes_max:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while self._holder.held_bytes > self._bytes_max and self._holder.is_busy:  # noqa: ASYNC110 - it ends in many ways
                    await asyncio.sleep(ROOM_POLL_S)
        self._held_at_most = self._holder.held_bytes

    async def _read(self, link: Link) -> None:
        """One blocking read of all inboxes. A position moves on only when the entries before it were taken in."""
        if self._again:
            self._positions = dict.fromkeys(self._positions, BEGINNING)
            self._count = min(FIRST_COUNT, self._count_max)
            self._again = False
        head = ("XREAD", "COUNT", self._count, "BLOCK", INBOX_BLOCK_MS, "STREAMS")
        command = (*head, *self._positions, *self._positions.values())
        (read,) = await link.exchange([command], blocking_s=INBOX_BLOCK_MS / 1000)
        if isinstance(read, Exception):
            raise read
        sizes = [sum(map(len, flat)) for _, entries in read or () for _, flat in entries]
        if sizes:
            # An upper bound, without asking the holder after each read: only when it is exceeded, the holder is asked
            # (`_room`).
            self._held_at_most += sum(sizes)
            self._count = next_count(self._count, max(sizes), self._count_max)
        for stream, entries in read or ():
            # A step leaves the inbox with its checkpoint, a control message as soon as it was taken in. Entries to be
            # removed are remembered until Redis has removed them: `_take` names entries that go along with one only the
            # first time.
            done = self._done.setdefault(stream, [])
            name = stream.decode()
            for entry, flat in entries:
                try:
                    done += await self._take(name, entry, dict(zip(flat[::2], flat[1::2], strict=True)))
                except UnreadableError as unreadable:
                    note(unreadable)
                    done.append(entry.decode())
            if done:
                (removed,) = await link.exchange([("XDEL", stream, *done)])
                if isinstance(removed, Exception):
                    raise removed
                done.clear()
            # After the removal: if that fails, the same entries are read, and removed, again.
            self._positions[name] = entries[-1][0].decode()


def next_count(count: int, largest: int, count_max: int) -> int:
    """How many entries of each shard the next read asks for. count, largest: entries asked for, and bytes of the
    largest entry found, in the read before
    """
    return max(1, min(count_max, GROWTH * count, READ_BYTES // max(1, largest)))


def entry_key(entry: str) -> tuple[int, int]:
    """A stream entry's id as a key that sorts like the stream."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)
