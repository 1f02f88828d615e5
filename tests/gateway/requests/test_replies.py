"""The read that brings the replies leaves the event loop to others."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from gateway.ports.turns import LoopTurns
from gateway.requests.replies import DELIVERED_AT_ONCE, Replies
from shared.contract.ids import GatewayId, ShardId
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.server_run import ServerRun

MANY = 20 * DELIVERED_AT_ONCE
SOON_S = 60.0


async def test_thousands_of_replies_in_one_entry_are_handed_out_in_their_order_and_in_many_turns(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decoupled model writes them, whose answers are small."""
    keys, gateway = Keyspace(key_prefix), GatewayId("g")
    replies, turns = Replies(redis, keys, gateway), LoopTurns()
    handed: list[str] = []
    in_turn = Counter[int]()

    def noted(token: str, raw: bytes, key: str) -> None:
        del raw, key
        handed.append(token)
        in_turn[turns.number] += 1

    monkeypatch.setattr(replies, "deliver", noted)
    await replies.open(ServerRun())
    await cast("Any", redis).xadd(keys.replies(ShardId(0), gateway), {str(number): "" for number in range(MANY)})
    reading = asyncio.create_task(replies.run())
    async with asyncio.timeout(SOON_S):
        while len(handed) < MANY:
            await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await replies.close()

    assert list(map(str, range(MANY))) == handed
    # Two turns, one after the other, may be counted as one.
    assert 2 * DELIVERED_AT_ONCE >= max(in_turn.values())
