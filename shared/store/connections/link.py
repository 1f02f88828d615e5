"""One connection to Redis with one user: many commands in one write, their replies in order, and nothing repeated.

redis-py's pipelines and scripts decide by themselves when to send again. Where a command must not be doubled, that
decision belongs to the caller. A link tells "nothing was sent" (`connect` failed) from "the outcome is unknown"
(`exchange` failed), and the caller knows which of its commands may be repeated. It also takes half of a pipeline's
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import hiredis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.store.commands import Redis
from shared.store.connections.cluster_redis import ClusterRedis
from shared.store.connections.homes import each, sound, tags_of, together
from shared.store.connections.mending import is_wrong_type, keys_of, mend
from shared.store.connections.redis_py import UnfitServerError, new_connection

LINKS_MAX = 16
"""Connections of `SharedLinks`: more would be no faster, because Redis does one thing at a time."""
SLOWEST_BYTES_S = 1 << 20
"""Least speed of sending that a time limit allows for, bytes/s: a large request must not look like a silent server."""


def streams_read(reply: Any) -> list[tuple[bytes, Any]]:
    """The streams of a reply to XREAD, with their entries.

    Redis 7.0 also names a stream without any: a blocking read was woken by an entry that is gone again.
    """
    return [(stream, entries) for stream, entries in reply or () if entries]


class Link:
    """A connection of its own, made like the connections of the given client's pool (a client of
    `redis_client.connect`); not for two tasks at once.
    """

    def __init__(self, redis: Redis) -> None:
        self._connection = new_connection(redis.connection_pool)
        self._waiting: asyncio.Timeout | None = None

    async def connect(self) -> None:
        """Connects unless connected. Raises one of `redis_py.CONNECTION_LOST`: then nothing has been sent."""
        connection = self._connection
        if connection.is_quiet:
            return
        if connection.is_connected:
            # Unexpected bytes, or the end of the stream: the server has gone since the last exchange.
            await connection.disconnect()
        await connection.connect()

    async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
        """Sends the commands in one write and reads as many replies. An error reply is an exception in its place: a
        ResponseError, or an UnfitServerError, after which the next `connect` makes a new connection.

        blocking_s  how long the server may hold its answer back, on top of the connection's own limit
        raises      one of `redis_py.CONNECTION_LOST`: then it is unknown which commands were carried out
        """
        connection = self._connection
        # redis-py's asyncio connections pack in Python; hiredis takes an eighth of the time for a batch of steps.
        packed: list[bytes] = [hiredis.pack_command(tuple(command)) for command in commands]
        limit_s = connection.reply_timeout_s + blocking_s + sum(map(len, packed)) / SLOWEST_BYTES_S
        try:
            replies: list[Any] = await connection.exchange(packed, limit_s)
            if ResponseError in map(type, replies):
                await self._mend(commands, packed, replies, limit_s)
        except BaseException:
            # On a half-read connection the next exchange would get this one's replies.
            await connection.disconnect(nowait=True)
            raise
        if UnfitServerError in map(type, replies):
            await connection.disconnect(nowait=True)
        return replies

    async def ask(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
        """As `exchange`, but raises the first error among the replies."""
        return sound(await self.exchange(commands, blocking_s=blocking_s))

    async def wait(self, command: Iterable[Any], *, blocking_s: float) -> Any:
        """Connects, and returns the reply to a command that blocks. None if it was cut short: what the server gave just
        then is lost. Raises as `connect` and `ask`.
        """
        # Never runs out by itself; `cut_short` makes it run out at once.
        self._waiting = waiting = asyncio.timeout(None)
        try:
            async with waiting:
                await self.connect()
                (reply,) = await self.ask([command], blocking_s=blocking_s)
                return reply
        except TimeoutError:
            # Expired means `cut_short`; any other timeout is a connection that does not answer.
            if not waiting.expired():
                raise
            return None
        finally:
            self._waiting = None

    def cut_short(self) -> None:
        """Ends the `wait` that is under way, if there is one. Any task may call it."""
        if self._waiting is not None:
            self._waiting.reschedule(0)
            self._waiting = None

    def parts(self) -> list[Link]:
        """The links to single servers of which it is made."""
        return [self]

    async def _mend(
        self, commands: Sequence[Iterable[Any]], packed: Sequence[bytes], replies: list[Any], limit_s: float
    ) -> None:
        """Sends the commands again that met a key of another type, after removing the key."""
        wrong = [at for at, reply in enumerate(replies) if is_wrong_type(reply) and keys_of(tuple(commands[at]))]
        if not wrong:
            return

        async def ask(questions: Sequence[Sequence[Any]]) -> list[Any]:
            return await self._connection.exchange([hiredis.pack_command(tuple(one)) for one in questions], limit_s)

        await mend(ask, [tuple(commands[index]) for index in wrong])
        again = await self._connection.exchange([packed[index] for index in wrong], limit_s)
        for index, reply in zip(wrong, again, strict=True):
            replies[index] = reply

    async def close(self) -> None:
        """Closes the connection; the next `connect` makes a new one."""
        # A silent server does not answer the end of TLS either. The connection is given up all the same.
        with suppress(RedisTimeoutError):
            await self._connection.disconnect()


class ClusterLink(Link):
    """A link to all homes of a Cluster. What is sent together goes to each home's server at once: commands to one home
    keep their order. Only a command to one home may block.

    A home is connected to with the first command for it, so one that is away fails its own commands alone: each of
    their replies is what was raised, unless all homes are away. It does not tell whether anything was sent.
    """

    def __init__(self, redis: ClusterRedis) -> None:
        self._redis = redis
        self._links: dict[str, Link] = {}
        self._waiting = None

    async def connect(self) -> None:
        """Has nothing to do."""

    async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
        asked = [tuple(command) for command in commands]
        tags = tags_of(asked)
        parts: dict[str, list[tuple[Any, ...]]] = {}
        for tag, command in zip(tags, asked, strict=True):
            parts.setdefault(tag, []).append(command)
        return await each(tags, {tag: self._sent(tag, part, blocking_s) for tag, part in parts.items()})

    def parts(self) -> list[Link]:
        return list(self._links.values())

    async def close(self) -> None:
        await together([link.close() for link in self._links.values()])

    async def _sent(self, tag: str, commands: Sequence[Sequence[Any]], blocking_s: float) -> list[Any]:
        if tag not in self._links:
            self._links[tag] = Link(cast(Redis, self._redis.at(tag)))
        link = self._links[tag]
        await link.connect()
        return await link.exchange(commands, blocking_s=blocking_s)


def new_link(redis: Redis) -> Link:
    """A link to wherever the client's commands go."""
    return ClusterLink(redis) if isinstance(redis, ClusterRedis) else Link(redis)


class SharedLinks:
    """A few connections that any number of tasks share. A task has one for a round trip, and waits while all are in
    use.
    """

    def __init__(self, redis: Redis) -> None:
        self._links = [new_link(redis) for _ in range(LINKS_MAX)]
        # The one that was used last goes first: in quiet times one connection is enough, and the others do not open.
        self._free: asyncio.LifoQueue[Link] = asyncio.LifoQueue()
        for link in self._links:
            self._free.put_nowait(link)

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[Link]:
        """A connected link. Raises as `Link.connect`."""
        link = await self._free.get()
        try:
            await link.connect()
            yield link
        finally:
            self._free.put_nowait(link)

    async def ask(self, commands: Sequence[Iterable[Any]]) -> list[Any]:
        """Sends the commands in one round trip. Raises as `Link.ask`."""
        if not commands:
            return []
        async with self.connected() as link:
            return await link.ask(commands)

    async def close(self) -> None:
        """Closes the connections. Nobody may be using one."""
        for link in self._links:
            await link.close()
