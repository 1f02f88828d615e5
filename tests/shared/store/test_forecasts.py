"""Questions to the leader of a model, while there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.contract.ids import sequence_id
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
