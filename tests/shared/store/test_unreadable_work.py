"""Stateless requests of which something cannot be read, on the real server: they are answered, and others run."""

from __future__ import annotations

import pytest

from shared.contract.batch_shape import Queueing
from shared.contract.errors import Code
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.messages import ReplyMessage, decode_reply, encode
from shared.contract.response_cache import entry_name
from shared.statistics.tally import ModelLoad
from shared.store.keyspace import TYPES, kind_of
from shared.store.work_scripts import Lookup, RequestId, Stored, Take, Taken, WorkDone, WorkItem, WorkScripts
from tests.scripted_mesh import GATEWAY, ScriptedMesh

ME, DEAD = ExecutorId("me"), ExecutorId("dead")
LOAD = ModelLoad("sum", "1", "0")
DONE = encode(ReplyMessage("1"))
LATE = encode(ReplyMessage("1", error_code="UNAVAILABLE"))
GARBAGE = b"\xff\x00 garbage"
SPOILT = [*(kind for kind in TYPES if kind.startswith(("work:", "cache:"))), "tally"]


async def enqueue(mesh: ScriptedMesh, tokens: str, *, ordered: bool = False) -> None:
    lookup = Lookup(entry_name("scope", "0", "digest"), "0", 0)
    items = [
        WorkItem(
            "sum",
            "1",
            GATEWAY,
            token,
            b"message",
            queueing=Queueing(timeout_us=60_000_000, ordered=ordered),
            lookup=lookup,
        )
        for token in tokens
    ]
    await mesh.scripts.run(WorkScripts(mesh.keys).enqueue(items, bound=100))


async def run_everything(mesh: ScriptedMesh, me: ExecutorId = ME) -> None:
    """Takes and answers until nothing is left."""
    work = WorkScripts(mesh.keys)
    for number in range(20):
        pull = work.pull(LOAD, me, f"t{number}", requests_max=2, rows_max=8, delay_us=0, take=Take.WHEN_PLAIN)
        taken = await mesh.scripts.run(pull)
        if not isinstance(taken, Taken):
            return
        stored = Stored(entry_name("scope", "0", "other"), 1 << 20)
        await mesh.scripts.run(work.finish(LOAD, me, [WorkDone(id, DONE, b"", stored) for id, _ in taken.requests]))
    raise AssertionError("there is no end to it")


async def answered(mesh: ScriptedMesh) -> dict[str, str]:
    """The code that each token was answered with."""
    stream = mesh.keys.replies(mesh.keys.shards[0], GatewayId(GATEWAY))
    found: dict[str, str] = {}
    for _, fields in (await mesh.redis.xrange(stream))[1:]:
        for token, reply in fields.items():
            code = decode_reply(reply).error_code
            assert code == found.setdefault(token.decode(), code), "a gateway takes the first answer"
    return found


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", SPOILT)
async def test_a_key_of_another_type_leaves_nobody_waiting(mesh: ScriptedMesh, kind: str, *, ordered: bool) -> None:
    await enqueue(mesh, "ab", ordered=ordered)
    # One of them is held by somebody else meanwhile.
    pull = WorkScripts(mesh.keys).pull(LOAD, DEAD, "t", requests_max=1, rows_max=1, delay_us=0, take=Take.WHEN_PLAIN)
    await mesh.scripts.run(pull)
    names = [
        *mesh.keys.work_queue("sum", "1"),
        *mesh.keys.cache(mesh.keys.shards[0]),
        mesh.keys.tally(mesh.keys.shards[0], "sum", "1", "0"),
    ]
    (name,) = [name for name in names if kind_of(name) == kind]
    client = mesh.redis
    await client.delete(name)
    await (client.set(name, "x") if TYPES[kind] != "string" else client.rpush(name, "x"))

    await enqueue(mesh, "cd", ordered=ordered)
    await run_everything(mesh)
    if kind != "work:wake":
        await mesh.scripts.run(WorkScripts(mesh.keys).requeue(LOAD, DEAD, given_up=DONE))
    await enqueue(mesh, "e", ordered=ordered)
    await run_everything(mesh)
    if kind == "work:wake":
        await mesh.scripts.run(WorkScripts(mesh.keys).requeue(LOAD, DEAD, given_up=DONE))
        await run_everything(mesh)

    codes = await answered(mesh)
    assert set("abcde") == set(codes)
    assert {codes[token] for token in "cde"} == {""}
    assert {codes[token] for token in "ab"} <= {"", Code.INTERNAL}
    await drop(mesh)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.startswith("work:")])
async def test_a_key_that_is_removed_leaves_nobody_waiting(mesh: ScriptedMesh, kind: str, *, ordered: bool) -> None:
    """Of three requests the first is held by an executor that dies, the second waits, and the last is answered."""
    work, queue = WorkScripts(mesh.keys), mesh.keys.work_queue("sum", "1")

    async def taken(executor: ExecutorId) -> RequestId:
        pull = work.pull(LOAD, executor, "t", requests_max=1, rows_max=1, delay_us=0, take=Take.WHEN_PLAIN)
        found = await mesh.scripts.run(pull)
        assert isinstance(found, Taken)
        ((id, _),) = found.requests
        return id

    await enqueue(mesh, "a", ordered=ordered)
    await taken(DEAD)
    await enqueue(mesh, "b", ordered=ordered)
    await mesh.scripts.run(work.finish(LOAD, ME, [WorkDone(await taken(ME), DONE, b"")]))
    await enqueue(mesh, "c", ordered=ordered)
    (name,) = [name for name in queue if kind_of(name) == kind]

    await mesh.redis.unlink(name)

    await run_everything(mesh)
    if await mesh.redis.hexists(queue.takers, DEAD):
        await mesh.scripts.run(work.requeue(LOAD, DEAD, given_up=DONE))
    await run_everything(mesh)
    codes = await answered(mesh)
    assert set("abc") == set(codes)
    assert {"", Code.INTERNAL} >= set(codes.values())
    assert ("" == codes["a"] == codes["c"]) or kind in ("work:meta", "work:messages")
    assert 0 == await mesh.redis.exists(queue.queue, queue.meta, queue.messages, queue.held, queue.order, queue.early)
    await drop(mesh)


async def test_a_tally_that_cannot_be_read_costs_no_other_models(mesh: ScriptedMesh) -> None:
    """One call carries the requests for many models, behind whose keys their tallies stand."""
    models = [f"sum{number}" for number in range(8)]
    lookup = Lookup(entry_name("scope", "0", "digest"), "0", 0)
    tallies = [mesh.keys.tally(mesh.keys.shards[0], model, "1", "0") for model in models]

    async def counted(token: str) -> list[int]:
        items = [WorkItem(model, "1", GATEWAY, token, b"message", lookup=lookup) for model in models]
        await mesh.scripts.run(WorkScripts(mesh.keys).enqueue(items, bound=100))
        return [await mesh.redis.llen(tally) for tally in tallies]

    before = await counted("first")
    for spoilt, tally in enumerate(tallies):
        await mesh.redis.set(tally, "x")
        before[spoilt] = 0

        after = await counted(f"behind {spoilt}")

        assert [count + 1 for count in before] == after
        before = after
    await mesh.redis.delete(*tallies, *(key for model in models for key in mesh.keys.work_queue(model, "1")))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("value", [GARBAGE, b"", b"a b c R 1 0 0 ", b"1.0.2 x 0 R 1 0 0 s"])
async def test_a_request_whose_place_cannot_be_read_is_answered_and_the_others_run(
    mesh: ScriptedMesh, value: bytes, *, ordered: bool
) -> None:
    await enqueue(mesh, "abc", ordered=ordered)
    queue, client = mesh.keys.work_queue("sum", "1"), mesh.redis
    await client.hset(queue.meta, f"{GATEWAY}/a", value)
    await client.zadd(queue.queue, {GARBAGE: 0, "short": 0, f"{'9' * 20}.0.{'0' * 16}.foreign/id": 0})
    await client.zadd(queue.deadlines, {GARBAGE: 1, "foreign": 1})
    await client.zadd(queue.order, {"foreign": 0})
    await client.hset(queue.held, mapping={"foreign": DEAD, GARBAGE: DEAD})
    await client.hset(queue.takers, DEAD, GARBAGE)

    await mesh.scripts.run(WorkScripts(mesh.keys).requeue(LOAD, DEAD, given_up=DONE))
    await run_everything(mesh)

    assert {"a": Code.INTERNAL, "b": "", "c": ""} == await answered(mesh)
    assert 0 == await client.exists(queue.queue, queue.meta, queue.messages, queue.held, queue.order, queue.early)
    await drop(mesh)


async def test_a_late_request_whose_place_cannot_be_read_is_answered_and_the_others_run(mesh: ScriptedMesh) -> None:
    await enqueue(mesh, "ab")
    queue = mesh.keys.work_queue("sum", "1")
    await mesh.redis.hset(queue.meta, f"{GATEWAY}/a", GARBAGE)
    await mesh.redis.zadd(queue.deadlines, {f"{GATEWAY}/a": 1})

    await run_everything(mesh)

    assert {"a": Code.INTERNAL, "b": ""} == await answered(mesh)
    await drop(mesh)


async def test_what_was_held_back_for_a_request_whose_place_cannot_be_read_leaves(mesh: ScriptedMesh) -> None:
    await enqueue(mesh, "ab", ordered=True)
    work = WorkScripts(mesh.keys)
    pull = work.pull(LOAD, DEAD, "t", requests_max=1, rows_max=1, delay_us=0, take=Take.WHEN_PLAIN)
    await mesh.scripts.run(pull)
    await run_everything(mesh)
    assert {} == await answered(mesh), "b is done, and a comes first"
    await mesh.redis.hset(mesh.keys.work_queue("sum", "1").meta, f"{GATEWAY}/a", GARBAGE)

    await mesh.scripts.run(work.requeue(LOAD, DEAD, given_up=DONE))

    assert {"a": Code.INTERNAL, "b": ""} == await answered(mesh)
    await drop(mesh)


async def test_a_queue_is_made_again_without_a_request_whose_place_cannot_be_read(mesh: ScriptedMesh) -> None:
    await enqueue(mesh, "abc")
    queue = mesh.keys.work_queue("sum", "1")
    await mesh.redis.hset(queue.meta, f"{GATEWAY}/a", GARBAGE)
    await mesh.redis.set(queue.queue, "x")

    await run_everything(mesh)

    assert {"a": Code.INTERNAL, "b": "", "c": ""} == await answered(mesh)
    await drop(mesh)


@pytest.mark.parametrize("value", [GARBAGE, b"7.5", b"%d" % (1 << 53), b"9" * 17, b"%d" % -(1 << 63)])
async def test_a_counter_of_arrivals_that_is_none_or_too_large_to_count_begins_anew(
    mesh: ScriptedMesh, value: bytes
) -> None:
    await mesh.redis.set(mesh.keys.work_queue("sum", "1").number, value)

    await enqueue(mesh, "ab")
    await run_everything(mesh)

    assert {"a": "", "b": ""} == await answered(mesh)
    await drop(mesh)


@pytest.mark.parametrize("ordered", [False, True])
async def test_what_comes_behind_a_removed_counter_of_arrivals_overtakes_nothing(
    mesh: ScriptedMesh, *, ordered: bool
) -> None:
    await enqueue(mesh, "ab", ordered=ordered)
    await mesh.redis.unlink(mesh.keys.work_queue("sum", "1").number)
    await enqueue(mesh, "cd", ordered=ordered)
    await enqueue(mesh, "e", ordered=ordered)

    await run_everything(mesh)

    assert list("abcde") == list(await answered(mesh))
    await drop(mesh)


async def test_a_request_of_another_hand_can_be_withdrawn_and_refused(mesh: ScriptedMesh) -> None:
    await enqueue(mesh, "abc")
    queue, client = mesh.keys.work_queue("sum", "1"), mesh.redis
    await client.hset(queue.meta, mapping={f"{GATEWAY}/a": GARBAGE, f"{GATEWAY}/b": GARBAGE})

    work = WorkScripts(mesh.keys)
    # Whoever comes to it answers it.
    assert [False] == await mesh.scripts.run(work.withdraw(LOAD, GatewayId(GATEWAY), ["a"], reply=LATE))
    while await mesh.scripts.run(work.refuse(LOAD, LATE)):
        pass

    assert {"a": Code.INTERNAL, "b": Code.INTERNAL, "c": Code.UNAVAILABLE} == await answered(mesh)
    await drop(mesh)


async def drop(mesh: ScriptedMesh) -> None:
    """What a mesh keeps for ever, or for a while."""
    shard = mesh.keys.shards[0]
    await mesh.redis.delete(mesh.keys.tally(shard, "sum", "1", "0"), *mesh.keys.cache(shard))
