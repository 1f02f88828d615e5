"""What a process does with Redis every so often, for as long as it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from shared.process import logs


async def at_intervals(
    period_s: float,
    call: Callable[[], Awaitable[object]],
    delayed: str,
    *,
    log: Callable[..., None] = logs.warning,
    at_once: bool = False,
) -> None:
    """Makes a call again and again, for ever. A lost connection, or a Redis that refuses it (it may have no memory
    left), delays it until its next turn.

    delayed  what is logged then
    at_once  the first call is made now, not after a period
    """
    if not at_once:
        await asyncio.sleep(period_s)
    while True:
        try:
            await call()
        except (RedisError, OSError) as error:
            log(delayed, cause=str(error))
        await asyncio.sleep(period_s)
