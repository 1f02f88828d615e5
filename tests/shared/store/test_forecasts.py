"""Questions to the leader of a model, while there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.contract.forecast import encode_forecast
from shared.contract.ids import SequenceId, sequence_id
from shared.store import forecasts
from shared.store.forecasts import Forecasts
from shared.store.keyspace import Keyspace


async def test_several_who_ask_at_once_hear_that_nobody_leads_and_leave_no_question(
    redis: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "PATIENCE_S", 0.1)
    keys, sequence = Keyspace(key_prefix), sequence_id("sum", "", 1)
    foretold = Forecasts(redis, keys)

    assert [None, None] == await asyncio.gather(foretold.of(sequence), foretold.of(sequence))
    assert 0 == await redis.xlen(keys.starts(keys.shard_of(sequence), "sum"))


async def test_a_leader_is_asked_again_after_a_while_or_when_none_has_answered(
    redis: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "PATIENCE_S", 0)
    keys, sequence = Keyspace(key_prefix), sequence_id("sum", "", 1)
    foretold, asked, utter = Forecasts(redis, keys), list[SequenceId](), forecasts.uttered

    async def uttered(*of: Any) -> Any:
        asked.append(of[2])
        return await utter(*of)

    monkeypatch.setattr(forecasts, "uttered", uttered)
    for count in (1, 2):
        assert None is await foretold.of(sequence)
        assert count == len(asked)

    await redis.set(keys.forecast("sum"), encode_forecast(()), ex=60)
    for count in (3, 3):
        assert await foretold.of(sequence) is not None
        assert count == len(asked)
    monkeypatch.setattr(forecasts, "ASK_AGAIN_S", 0)
    await foretold.of(sequence)
    assert 4 == len(asked)


async def test_models_that_were_asked_about_long_ago_are_forgotten(
    redis: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "ASK_AGAIN_S", 0)
    keys = Keyspace(key_prefix)
    foretold = Forecasts(redis, keys)
    for number in range(20):
        await redis.set(keys.forecast(f"m{number}"), encode_forecast(()), ex=60)
        assert await foretold.of(sequence_id(f"m{number}", "", 1)) is not None

    assert {"m19"} == foretold._asked.keys()


async def test_who_leaves_before_a_leader_has_answered_leaves_no_question(redis: Any, key_prefix: str) -> None:
    keys, sequence = Keyspace(key_prefix), sequence_id("sum", "", 1)
    foretold = Forecasts(redis, keys)
    asking = asyncio.create_task(foretold.of(sequence))
    while not foretold._asked:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])

    assert asking.cancelled()
    assert 0 == await redis.xlen(keys.starts(keys.shard_of(sequence), "sum"))
