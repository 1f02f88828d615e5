"""What cannot be read is left out, counted and logged once; a key of another type is taken for an empty one."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from shared.contract.ids import ExecutorId, GatewayId, SequenceId, ShardId
from shared.store import reading
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.link import Link
from shared.store.keyspace import TYPES, Keyspace, kind_of
from shared.store.waiting_line import read_lines
from tests.every_key import every_key

ARGUMENTS: dict[str, Any] = {
    "shard": ShardId(0),
    "model": "m:1",
    "version": "2",
    "generation": "g",
    "load": "l",
    "executor": ExecutorId("e"),
    "gateway": GatewayId("g"),
    "name": "n",
    "tenant": "t",
    "sequence": SequenceId("m:1||s:x"),
}


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests found is not told here."""
    monkeypatch.setattr(reading, "found", reading.Found())


@pytest.fixture
def keys(key_prefix: str) -> Keyspace:
    return Keyspace(key_prefix, 4)


def test_every_key_has_a_kind_and_every_kind_a_key(keys: Keyspace) -> None:
    assert set(TYPES) == {kind_of(key) for key in every_key(keys, ARGUMENTS)}


def test_a_value_that_cannot_be_read_is_left_out_counted_and_logged_once(
    keys: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "seqmesh"):
        found = [reading.value_of(keys.models, data, int, field="m") for data in (b"7", b"x", b"y")]

    assert [7, None, None] == found
    assert {"models": 2} == reading.found.counts
    (line,) = caplog.records
    fields = cast("Any", line).fields
    assert f"{keys.models} m" == fields["key"]
    assert reading.REMEDIES["models"] == fields["remedy"]


def test_what_is_kept_in_mind_is_bounded(keys: Keyspace) -> None:
    for number in range(2 * reading.NAMES_MAX):
        reading.noted(keys.models, "garbage", field=str(number))

    assert reading.NAMES_MAX == len(reading.found.names)
    assert {"models": 2 * reading.NAMES_MAX} == reading.found.counts


async def test_what_all_services_and_scripts_found_is_added_up(redis: Redis, keys: Keyspace) -> None:
    reading.noted(keys.models, "garbage")
    await reading.tell_now(redis, keys)
    reading.noted(keys.models, "garbage")
    await reading.tell_now(redis, keys)
    for field, value in {"seq": 3, "last:seq": "x", "models": "garbage", "feed": "9" * 300}.items():
        await redis.hset(keys.unreadable(ShardId(1)), field, value)

    assert {"models": 2, "seq": 3} == await reading.read_counts(redis, keys)
    assert {} == reading.found.counts


async def test_a_count_that_nothing_counts_to_is_left_out(redis: Any, keys: Keyspace) -> None:
    """A page of metrics has the counts of all models: Python would count on, and could not write it."""
    await redis.hset(keys.line(ShardId(0), "sum"), mapping={"w": 2, "s:1": "9" * 300, "out:1": 1 << 63})

    line = (await read_lines(redis, keys, ["sum"]))["sum"]

    assert (2, 0, 0) == (line.first, line.steps.total(), line.paged_out.total())
    assert 2 == reading.found.counts["line"]


@pytest.mark.parametrize("transaction", [True, False])
async def test_a_key_of_another_type_is_taken_for_an_empty_one(
    redis: Redis, keys: Keyspace, *, transaction: bool
) -> None:
    await redis.set(keys.models, "no hash")

    assert {} == await redis.hgetall(keys.models)

    await redis.set(keys.models, "no hash")
    async with redis.pipeline(transaction=transaction) as pipe:
        pipe.hset(keys.executors, "a", "1")
        pipe.hset(keys.models, "b", "2")
        await pipe.execute()

    assert {b"b": b"2"} == await redis.hgetall(keys.models)
    assert {b"a": b"1"} == await redis.hgetall(keys.executors)
    assert {"models": 2} == reading.found.counts


async def test_a_link_mends_the_key_and_sends_only_its_command_again(redis: Redis, keys: Keyspace) -> None:
    feed, starts = keys.feed(ShardId(0), "m"), keys.starts(ShardId(0), "m")
    entry = await redis.xadd(feed, {"a": "1"})
    await redis.hset(starts, "no", "stream")
    link = Link(redis)
    await link.connect()

    added, read, refused = await link.exchange(
        [("RPUSH", keys.tally(ShardId(0), "m", "1", "0"), "x"), ("XREAD", "STREAMS", feed, starts, "0", "0"), ("NO",)]
    )
    await link.close()

    assert 1 == added
    assert [[feed.encode(), [[entry, [b"a", b"1"]]]]] == read
    assert isinstance(refused, Exception)
    assert {"starts": 1} == reading.found.counts
    assert 0 == await redis.exists(starts)
    await redis.delete(feed, keys.tally(ShardId(0), "m", "1", "0"))


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_link_leaves_keys_whose_type_its_user_may_not_ask_for(
    redis: Any, keys: Keyspace, *, is_told: bool
) -> None:
    """Which of several is wrong, nobody knows then."""
    feed, starts = keys.feed(ShardId(0), "m"), keys.starts(ShardId(0), "m")
    await redis.xadd(feed, {"a": "1"})
    await redis.hset(starts, "no", "stream")
    user = f"user-{keys.prefix}"
    await redis.execute_command("ACL", "SETUSER", user, "on", "nopass", "~*", "+@all", *(() if is_told else ("-type",)))
    link = Link(redis)
    await link.connect()
    await link.ask([("AUTH", user, "any")])

    (read,) = await link.exchange([("XREAD", "STREAMS", feed, starts, "0", "0")])

    await link.close()
    await redis.execute_command("ACL", "DELUSER", user)
    assert (is_told, 1) == (not isinstance(read, Exception), await redis.exists(feed))
    await redis.delete(feed, starts)


async def test_a_wait_for_several_lists_mends_whichever_is_none(redis: Redis, keys: Keyspace) -> None:
    first, second, third = (keys.work_queue(model, "1").wake for model in ("a", "b", "c"))
    await redis.set(second, "no list")
    link = Link(redis)
    await link.connect()

    pushed, popped = await link.exchange([("RPUSH", third, "x"), ("BLPOP", first, second, third, 1)], blocking_s=1)
    await link.close()

    assert (1, [third.encode(), b"x"]) == (pushed, popped)
    assert {"work:wake": 1} == reading.found.counts


async def test_a_mesh_whose_number_of_shards_is_garbage_is_joined_by_who_knows_it(redis: Redis, keys: Keyspace) -> None:
    await redis.hset(keys.mesh, "shards", "garbage")

    with pytest.raises(UnfitRedisError, match="set to it"):
        await join_mesh(redis, keys.prefix)
    await join_mesh(redis, keys.prefix, 3)

    assert b"3" == await redis.hget(keys.mesh, "shards")
