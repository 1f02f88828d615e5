"""What processes know of each other."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from shared.keyspace import Keyspace
from shared.membership import Membership
from shared.messages import ModelRecord
from tests.gateway.fake_executor import running_sum


async def test_a_model_s_record_is_decoded_once_and_again_when_it_has_changed(redis: Redis, key_prefix: str) -> None:
    membership = Membership(redis, Keyspace(key_prefix))
    record = ModelRecord(running_sum("sum"), "{}", ("1",))
    assert await membership.model("sum") is None
    await membership.publish(record)

    first = await membership.model("sum")
    assert record == first
    assert first is await membership.model("sum")
    changed = msgspec.structs.replace(record, versions=("1", "2"))
    await membership.publish(changed)
    assert changed == await membership.model("sum")
    await redis.delete(Keyspace(key_prefix).models)
    assert await membership.model("sum") is None
