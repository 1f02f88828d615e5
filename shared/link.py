"""One connection to Redis with one user: many commands in one write, their replies in order, and nothing repeated.

redis-py's pipelines and scripts decide by themselves when to send again. Where a command must not be doubled, that
decision belongs to the caller: a link tells "nothing was sent" (`connect` failed) from "nobody knows" (`exchange`
failed), and the caller knows which of its commands may be repeated. It also costs half of a pipeline's time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis_client import REPLY_TIMEOUT_S, UnfitServerError

SLOWEST_BYTES_S = 1 << 20
"""What is sent may take so long: a large request must not look like a server that is silent."""


class Link:
    """A connection of its own, made like those of the given client's pool; not safe for two tasks at once."""

    def __init__(self, redis: Redis) -> None:
        # redis-py types connections only abstractly; these methods are public on every asyncio connection.
        self._connection = cast("Any", redis.connection_pool).make_connection()

    async def connect(self) -> None:
        """Connects unless connected. Raises one of `redis_client.CONNECTION_LOST`: then nothing has been sent."""
        connection = self._connection
        if connection.is_connected:
            if not await connection.can_read():
                return
            # Bytes that nobody asked for, or the end of the stream: Redis has gone since the last exchange.
            await connection.disconnect()
        await connection.connect()

    async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
        """Sends the commands in one write and reads as many replies; an error reply is an exception in its place: a
        ResponseError, or an UnfitServerError, after which the link leads elsewhere when it is connected again.

        blocking_s  how long the server may hold its answer back, on top of the connection's own limit
        raises      one of `redis_client.CONNECTION_LOST`: then nobody knows which of the commands were carried out
        """
        connection = self._connection
        replies: list[Any] = []
        limit_s: float = getattr(connection, "reply_timeout_s", REPLY_TIMEOUT_S) + blocking_s
        try:
            # redis-py's asyncio connections pack in Python; hiredis takes an eighth of the time for a batch of steps.
            packed: list[bytes] = [hiredis.pack_command(tuple(command)) for command in commands]
            async with asyncio.timeout(limit_s + sum(map(len, packed)) / SLOWEST_BYTES_S):
                await connection.send_packed_command(packed, check_health=False)
                for _ in commands:
                    try:
                        # math.inf: the time limit is ours, one for the whole exchange.
                        replies.append(await connection.read_response(timeout=math.inf, disconnect_on_error=False))
                    except (ResponseError, UnfitServerError) as error:
                        replies.append(error)
        except BaseException as failure:
            # A half-read connection would give the next exchange this one's replies.
            await connection.disconnect(nowait=True)
            if isinstance(failure, TimeoutError):
                raise RedisTimeoutError(f"no answer within {limit_s:g} s") from failure
            raise
        if any(isinstance(reply, UnfitServerError) for reply in replies):
            await connection.disconnect(nowait=True)
        return replies

    async def close(self) -> None:
        """Closes the connection; the next `connect` makes a new one."""
        await self._connection.disconnect()
