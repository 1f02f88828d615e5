"""The calls between models that have waited for a while, of all executors, in one hash.

Most calls are answered before anybody would write them here. Each process writes a line while it has such calls, and
removes it when it has none. A line that is not renewed counts no more, and whoever tells its own calls removes it: the
hash itself stays for as long as any process renews it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.contract.calls import WaitingCall, WaitingCalls
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of

TTL_MS = 10_000
_decode = msgspec.json.Decoder(WaitingCalls).decode


async def tell_waiting(redis: Redis, keys: Keyspace, process: str, calls: Sequence[WaitingCall]) -> list[WaitingCall]:
    """Writes the calls of a process, and returns those of all. Raises what redis-py raises."""
    now_ms = await redis_now_ms(redis)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(keys.calls, process, msgspec.json.encode(WaitingCalls(now_ms, tuple(calls))))
        pipe.pexpire(keys.calls, TTL_MS)
        await pipe.execute()
    found: list[WaitingCall] = []
    over: list[bytes] = []
    for name, data in (await redis.hgetall(keys.calls)).items():
        line = value_of(keys.calls, data, _decode, field=text_of(name))
        if line is None:
            continue
        if abs(now_ms - line.told_ms) < TTL_MS:
            found += line.calls
        else:
            over.append(name)
    if over:
        # A process that renews its line just now tells it again with its next look.
        await redis.hdel(keys.calls, *over)
    return found


async def forget_waiting(redis: Redis, keys: Keyspace, process: str) -> None:
    """Removes the line of a process. Raises what redis-py raises."""
    await redis.hdel(keys.calls, process)
