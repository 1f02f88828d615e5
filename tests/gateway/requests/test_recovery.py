"""Going over to another run of Redis, when that run is in trouble itself."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from redis.exceptions import OutOfMemoryError

from gateway.requests.recovery import RestartRecovery
from shared.contract.ids import ShardId
from shared.store.redis_client import connect
from shared.store.server_run import AnotherRunError, ServerRun


class Callers:
    """In place of `Replies` and `Dispatch`. fails: times that Redis has no memory for a new reply stream."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.asked = 0

    def __len__(self) -> int:
        return 1

    async def reopen(self, redis: Any) -> list[ShardId]:
        if self.fails:
            self.fails -= 1
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        return []

    async def ask_again(self, redis: Any, lost: Any) -> None:
        self.asked += 1


class Uncut:
    """In place of a connection."""

    def cut(self) -> None:
        """Nobody uses it."""


async def test_a_redis_that_comes_back_without_memory_delays_the_recovery_and_does_not_end_it(redis_url: str) -> None:
    run, callers = ServerRun(), Callers(fails=2)
    run.meet("the run before", Uncut())
    recovery = RestartRecovery(lambda new: connect(redis_url, run=new), run, cast("Any", callers), cast("Any", callers))
    working = asyncio.create_task(recovery.run())
    with pytest.raises(AnotherRunError):
        run.meet("another", Uncut())

    async with asyncio.timeout(60):
        while run.changed.is_set():
            assert not working.done(), working.exception()
            await asyncio.sleep(0.005)
    working.cancel()

    assert (0, 1) == (callers.fails, callers.asked)
    assert run.bound not in ("", "the run before", "another")
