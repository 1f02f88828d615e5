"""Stateless requests of a version that nobody serves any more, on the real server."""

from __future__ import annotations

from executor.stateless.work_source import refuse_waiting, takers_of
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.messages import ReplyMessage, encode
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.link import SharedLinks
from shared.store.keyspace import Keyspace
from shared.store.work_scripts import Take, WorkDone, WorkItem, WorkScripts, request_id
from tests.scripted_mesh import GATEWAY, ScriptedMesh

DEAD, ALIVE = ExecutorId("dead-1"), ExecutorId("alive-1")
LOAD = ModelLoad("sum", "1", "g1")
GONE = encode(ReplyMessage("1", error_code="NOT_FOUND", error="gone"))


async def test_what_a_dead_executor_held_is_refused_too_and_what_a_living_one_holds_is_not(
    redis: Redis, key_prefix: str
) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    work = WorkScripts(mesh.keys)
    items = [WorkItem(LOAD.model, LOAD.version, GATEWAY, token, token.encode()) for token in "abc"]
    await mesh.scripts.run(work.enqueue(items, bound=0))
    for executor in (DEAD, ALIVE):
        pull = work.pull(LOAD, executor, "1", requests_max=1, rows_max=1, delay_us=0, take=Take.WHEN_PLAIN)
        await mesh.scripts.run(pull)

    links = SharedLinks(redis)
    await refuse_waiting(links, mesh.scripts, mesh.keys, LOAD, GONE, alive={ALIVE})
    await links.close()

    keys = mesh.keys.work_queue(LOAD.model, LOAD.version)
    entries = await redis.xrange(mesh.keys.replies(mesh.keys.home_shard(LOAD.model), GatewayId(GATEWAY)))
    assert {b"a": GONE, b"c": GONE} == {token: reply for _, fields in entries[1:] for token, reply in fields.items()}
    assert [f"{GATEWAY}/b".encode()] == await redis.hkeys(keys.held) == await redis.hkeys(keys.messages)


async def test_nothing_stays_of_a_queue_whose_last_request_is_answered(redis: Redis, key_prefix: str) -> None:
    """Else each version that was ever loaded would leave its counter in Redis."""
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    work, keys = WorkScripts(mesh.keys), mesh.keys.work_queue(LOAD.model, LOAD.version)
    links = SharedLinks(redis)
    items = [WorkItem(LOAD.model, LOAD.version, GATEWAY, token, token.encode()) for token in "ab"]
    await mesh.scripts.run(work.enqueue(items, bound=0))
    await mesh.scripts.run(work.pull(LOAD, ALIVE, "1", requests_max=1, rows_max=1, delay_us=0, take=Take.WHEN_PLAIN))

    await refuse_waiting(links, mesh.scripts, mesh.keys, LOAD, GONE, alive={ALIVE})
    assert 1 == await redis.exists(keys.number)

    await mesh.scripts.run(work.finish(LOAD, ALIVE, [WorkDone(request_id(GATEWAY, "a"), GONE)]))
    await mesh.scripts.run(work.requeue(LOAD, ALIVE))  # as an executor does that ends a model
    await refuse_waiting(links, mesh.scripts, mesh.keys, LOAD, GONE, alive={ALIVE})
    await links.close()

    assert 0 == await redis.exists(*keys)


async def test_a_name_that_is_no_text_is_no_executors_and_goes(redis: Redis, key_prefix: str) -> None:
    """Else all executors would put its work back every second, for ever, and say so."""
    queues = [Keyspace(key_prefix, 3).work_queue(model, "1") for model in ("sum", "other")]
    for queue in queues:
        await redis.hset(queue.takers, b"\xff\xc1", "t 1")
        await redis.hset(queue.takers, DEAD, "t 2")

    links = SharedLinks(redis)
    found = await takers_of(links, queues)
    await links.close()

    assert [{DEAD}, {DEAD}] == found
    assert [[DEAD.encode()]] * 2 == [await redis.hkeys(queue.takers) for queue in queues]
    await redis.delete(*[queue.takers for queue in queues])
