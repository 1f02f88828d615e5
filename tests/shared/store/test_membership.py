"""What processes know of each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.models.catalog import Catalog
from shared.contract.ids import ExecutorId
from shared.contract.limits import INSTANCES_MAX
from shared.contract.messages import ExecutorRegistration, ModelRecord, ServedModel
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership, lines_of
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


async def test_who_is_removed_leaves_no_inbox(redis: Any, key_prefix: str) -> None:
    """Unless something lies there still."""
    keys = Keyspace(key_prefix, 2)
    membership, executor = Membership(redis, keys), ExecutorId("e1")
    await membership.register(ExecutorRegistration(executor, "e", "host", 1, 0, ()), lease_ms=60_000)
    inboxes = [keys.inbox(shard, executor) for shard in keys.shards]
    for inbox in inboxes:
        await redis.xadd(inbox, {"k": "owned"})
    await redis.xtrim(inboxes[1], maxlen=0)

    assert [True, False] == [await membership.remove(executor) for _ in range(2)]
    assert [1, 0] == [await redis.exists(inbox) for inbox in inboxes]
    await redis.xtrim(inboxes[0], maxlen=0)
    assert not await membership.remove(executor)
    assert 0 == await redis.exists(*inboxes)


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
    assert await membership.remove(registration.executor)
    assert [] == await membership.members()
    assert not await membership.remove(registration.executor)


@pytest.mark.parametrize("instances", [-1, INSTANCES_MAX + 1, 10**9])
async def test_a_registration_with_more_instances_than_there_can_be_is_unreadable(
    redis: Redis, key_prefix: str, instances: int
) -> None:
    """Schedulers make a table for each. The executor sees it, and registers anew."""
    membership = Membership(redis, Keyspace(key_prefix))
    served = ServedModel("sum", "1", instances, 4)
    registration = ExecutorRegistration(ExecutorId("e1"), "e", "host", 1, 0, (served,))
    await membership.register(registration, lease_ms=60_000)

    assert not await membership.is_known(registration.executor)
    assert [()] == [member.registration.models for member in await membership.members() if not member.alive]
    assert await membership.remove(registration.executor)


@pytest.mark.parametrize(
    "odd",
    [
        {"models": [{"model": "sum", "version": "", "instances": 1, "slots": 4}]},
        {"models": [{"model": "sum", "version": "one", "instances": 1, "slots": 4}]},
        {"repository": [{"model": "sum", "version": "9" * 5000, "state": "READY"}]},
        {"applied": "1-2-3"},
    ],
)
async def test_a_registration_that_no_gateway_could_use_is_unreadable(
    redis: Any, key_prefix: str, odd: dict[str, Any]
) -> None:
    """Gateways sort versions by their numbers, and compare what was carried out: whoever reads it must not end."""
    keys, executor = Keyspace(key_prefix), ExecutorId("e1")
    membership = Membership(redis, keys)
    sound = {"executor": executor, "name": "e", "host": "host", "pid": 1, "started_ms": 0}
    await redis.hset(keys.executors, executor, msgspec.json.encode(sound | odd))

    assert not await membership.is_known(executor)
    await Catalog(membership).refresh()


@pytest.mark.parametrize("version", ["", "one", "9" * 5000])
async def test_a_model_of_a_version_that_is_no_number_is_not_there(redis: Any, key_prefix: str, version: str) -> None:
    membership = Membership(redis, Keyspace(key_prefix))
    await membership.publish(ModelRecord(running_sum("sum"), "{}", (version,)))

    assert {} == await membership.models()


async def test_a_look_takes_one_round_trip_unless_an_executor_has_come_or_gone(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = Membership(redis, Keyspace(key_prefix))
    trips, pipeline = [0], redis.pipeline

    def counted(transaction: bool = True) -> Any:
        trips[0] += not transaction
        return pipeline(transaction)

    async def look() -> tuple[list[tuple[str, bool]], int]:
        trips[0] = 0
        members, now_ms = await membership.look()
        assert abs(now_ms - await redis_now_ms(redis)) < 60_000
        return [(member.registration.executor, member.alive) for member in members], trips[0]

    monkeypatch.setattr(redis, "pipeline", counted)
    first, second = (ExecutorRegistration(ExecutorId(name), name, "host", 1, 0, ()) for name in ("e1", "e2"))
    assert ([], 1) == await look()
    await membership.register(second, lease_ms=60_000)
    assert ([("e2", True)], 2) == await look()
    assert ([("e2", True)], 1) == await look()
    await membership.register(first, lease_ms=60_000)
    assert ([("e1", True), ("e2", True)], 2) == await look()
    await membership.give_up(second.executor)
    assert ([("e1", True), ("e2", False)], 1) == await look()
    await membership.remove(second.executor)
    assert ([("e1", True)], 2) == await look()


async def test_who_registers_is_alive_at_once_and_for_as_long_as_it_says(redis: Any, key_prefix: str) -> None:
    """A leader that reads of it before its first renewal must not count it as lost."""
    keys = Keyspace(key_prefix)
    membership = Membership(redis, keys)
    registration = ExecutorRegistration(ExecutorId("e1"), "e", "host", 1, 0, ())

    await membership.register(registration, lease_ms=60_000)

    assert 0 < await redis.pttl(keys.executor_lease(ExecutorId("e1"))) <= 60_000
    await membership.remove(ExecutorId("e1"))


async def test_what_executors_of_one_repository_say_alike_is_kept_and_gone_over_once(
    redis: Redis, key_prefix: str
) -> None:
    """A thousand models on two hundred executors are two hundred thousand lines, for each who reads them."""
    membership = Membership(redis, Keyspace(key_prefix))
    same = ServedModel("sum", "1", 1, 4), ServedModel("sum", "2", 1, 4)
    for name, models in {"e1": same, "e2": same, "e3": same[:1]}.items():
        await membership.register(ExecutorRegistration(ExecutorId(name), name, "host", 1, 0, models), lease_ms=60_000)

    one, two, three = (member.registration for member in await membership.members())
    assert one.models is two.models
    assert [*same, *same[:1]] == list(lines_of(each.models for each in (one, two, three)))
    for executor in (one, two, three):
        await membership.remove(executor.executor)


async def test_records_are_published_that_the_mesh_has_otherwise(redis: Redis, key_prefix: str) -> None:
    """With each model that it loads an executor publishes all that it has."""
    keys = Keyspace(key_prefix)
    membership = Membership(redis, keys)
    records = [ModelRecord(running_sum(name), "{}", ("1",)) for name in ("a", "b", "c")]
    await membership.publish_changed(records[:1])
    # As the mesh has it, whatever it is: nothing has written it since.
    await redis.hset(keys.models, "a", b"as it was")
    changed = msgspec.structs.replace(records[1], versions=("1", "2"))
    await membership.publish(changed)

    await membership.publish_changed(records)

    assert {"b": records[1], "c": records[2]} == await membership.models()
    assert [records[0]] == await membership.unknown(records)
    await membership.publish(records[0])
    assert [] == await membership.unknown(records)
    await membership.publish_changed([])
