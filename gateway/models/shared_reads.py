"""Reads of the mesh that take long, one at a time: any number of clients that ask at once cost as much as two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
D = TypeVar("D")


class SharedReads(Generic[K, T]):
    """read: makes what is asked for under a key. What it raises, all who have asked get"""

    def __init__(self, read: Callable[[K], Awaitable[T]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._next: dict[K, asyncio.Task[T]] = {}
        """The reads that have not begun yet."""
        self._running: set[asyncio.Task[T]] = set()

    async def get(self, key: K) -> T:
        """What a read gives that begins after this call. It goes on when its callers leave."""
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._in_turn(key), name="shared read")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, key: K) -> T:
        async with self._turn:
            del self._next[key]
            return await self._read(key)


class SharedDocument(Generic[T, D]):
    """What `make` makes of a read, once for all who got the same one: a thousand may go on in one turn of the loop, and
    a document takes some milliseconds.
    """

    def __init__(self, make: Callable[[T], D]) -> None:
        self._make = make
        self._last: tuple[T, D] | None = None

    def of(self, read: T) -> D:
        if self._last is None or self._last[0] is not read:
            self._last = read, self._make(read)
        return self._last[1]
