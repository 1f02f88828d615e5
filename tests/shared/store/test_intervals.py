"""What is done at intervals goes on though Redis is away, and ends with any other error."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import WatchError

from shared.process import logs
from shared.store.intervals import at_intervals


@pytest.mark.parametrize(("at_once", "pauses"), [(False, 4), (True, 3)])
async def test_a_call_that_redis_fails_is_logged_and_made_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, at_once: bool, pauses: int
) -> None:
    sleep = AsyncMock()
    monkeypatch.setattr("shared.store.intervals.asyncio", SimpleNamespace(sleep=sleep))
    # A watched key and a lost connection are a WatchError, which is none of a lost connection.
    failures = [OSError("a"), RedisConnectionError("b"), WatchError("c"), ValueError("of its own")]

    async def call() -> None:
        raise failures.pop(0)

    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="of its own"):
        await at_intervals(5.0, call, "counts delayed", log=logs.warning, at_once=at_once)

    assert ["counts delayed"] * 3 == caplog.messages
    assert [((5.0,),)] * pauses == sleep.call_args_list
