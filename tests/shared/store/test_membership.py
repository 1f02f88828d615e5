"""What processes know of each other."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ModelRecord
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership
from tests.gateway.fake_executor import running_sum


async def test_a_model_s_record_is_decoded_once_and_again_when_it_has_changed(redis: Redis, key_prefix: str) -> None:
    membership = Membership(redis, Keyspace(key_prefix))
    record = ModelRecord(running_sum("sum"), "{}", ("1",))
    assert await membership.model("sum") is None
    await membership.publish(record)

    first = await membership.model("sum")
    assert record == first
    assert first is await membership.model("sum")
    assert first is (await membership.models())["sum"]
    changed = msgspec.structs.replace(record, versions=("1", "2"))
    await membership.publish(changed)
    assert {"sum": changed} == await membership.models()
    assert changed == await membership.model("sum")
    await redis.delete(Keyspace(key_prefix).models)
    assert await membership.model("sum") is None


async def test_a_registration_is_decoded_once_and_again_when_it_has_changed(redis: Redis, key_prefix: str) -> None:
    membership = Membership(redis, Keyspace(key_prefix))
    registration = ExecutorRegistration(ExecutorId("e1"), "e", "host", 1, 0, ())
    await membership.register(registration, lease_ms=60_000)

    (first,) = await membership.members()
    (again,) = await membership.members()
    assert registration == first.registration
    assert first.registration is again.registration
    assert first == again
    await membership.give_up(registration.executor)
    assert [Member(registration, alive=False)] == await membership.members()
    await membership.leave(registration)
    assert [True] == [member.registration.leaving for member in await membership.members()]
    await membership.remove(registration.executor)
    assert [] == await membership.members()


async def test_who_registers_is_alive_at_once_and_for_as_long_as_it_says(redis: Any, key_prefix: str) -> None:
    """A leader that reads of it before its first renewal must not count it as lost."""
    keys = Keyspace(key_prefix)
    membership = Membership(redis, keys)
    registration = ExecutorRegistration(ExecutorId("e1"), "e", "host", 1, 0, ())

    await membership.register(registration, lease_ms=60_000)

    assert 0 < await redis.pttl(keys.executor_lease(ExecutorId("e1"))) <= 60_000
    await membership.remove(ExecutorId("e1"))
