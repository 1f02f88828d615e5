"""What the memory program adds up."""

from __future__ import annotations

from redis import Redis

from benchmarks.memory import Cost, bytes_by_kind, line
from shared.contract.ids import ExecutorId, sequence_id
from shared.store.keyspace import Keyspace


def test_bytes_are_added_up_by_the_kind_of_key(redis_server: str, key_prefix: str) -> None:
    keys = Keyspace(key_prefix)
    with Redis.from_url(redis_server) as redis:
        for number in range(3):
            own = keys.sequence(sequence_id("m", "", f"a:b {number}"))
            redis.set(own.idle, "1", px=60_000)
            redis.hset(own.record, "st", "e")
            redis.pexpire(own.record, 60_000)
        redis.sadd(keys.owned(keys.shards[0], ExecutorId("a"), "m"), "x" * 500)
        redis.pexpire(keys.owned(keys.shards[0], ExecutorId("a"), "m"), 60_000)
        found = bytes_by_kind(redis, key_prefix)

    assert {"idle", "seq", "owned"} == set(found)
    assert 0 < 3 * 40 < found["idle"] < found["seq"]
    assert found["owned"] > 500


def test_a_row_names_every_part() -> None:
    cost = Cost({"seq": 500.4, "idle": 90.0}, 700.0, {"gateway": 1.0, "executor": 2.0})

    assert "4096 B  ids      redis      700  (idle 90, seq 500)  executor 2, gateway 1" in line(4096, "ids", cost)
