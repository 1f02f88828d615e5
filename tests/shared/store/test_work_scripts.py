"""The queue of stateless work, script by script, on the real server: order, policies, holders, repeated calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.contract.batch_shape import Queueing
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.messages import ReplyMessage, decode_reply, encode
from shared.statistics.tally import ModelLoad, unpacked
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.scripts import Scripts
from shared.store.work_scripts import Front, Lookup, Stored, Take, Taken, WorkDone, WorkItem, WorkScripts, request_id
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import GATEWAY, ScriptedMesh

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
LOAD = ModelLoad("sum", "1", "g1")


class Queue:
    """One queue and its callers' answers, under short names: a request is its token."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self.mesh = mesh
        self.redis = mesh.redis
        self.keys = mesh.keys.work_queue(LOAD.model, LOAD.version)
        self.work = WorkScripts(mesh.keys)
        self._positions: dict[str, str] = {}
        self._takes = 0

    async def call(self, call: Call[Any]) -> Any:
        return await self.mesh.scripts.run(call)

    async def enqueue(self, *tokens: str, bound: int = 0, **fields: Any) -> list[bool]:
        items = [WorkItem(LOAD.model, LOAD.version, GATEWAY, t, t.encode(), Queueing(**fields)) for t in tokens]
        return await self.call(self.work.enqueue(items, bound=bound))

    async def pull(
        self,
        executor: ExecutorId = ALICE,
        *,
        requests: int = 100,
        rows: int = 100,
        delay_us: int = 0,
        take: int = Take.WHEN_PLAIN,
        tag: str = "",
    ) -> Taken | Front:
        self._takes += 1
        return await self.call(
            self.work.pull(
                LOAD,
                executor,
                tag or f"t{self._takes}",
                requests_max=requests,
                rows_max=rows,
                delay_us=delay_us,
                take=take,
            )
        )

    async def taken(self, executor: ExecutorId = ALICE, **limits: Any) -> list[str]:
        """The tokens of a batch that was taken at once."""
        pulled = await self.pull(executor, **limits)
        assert isinstance(pulled, Taken), pulled
        assert [id.partition("/")[2] for id, _ in pulled.requests] == [m.decode() for _, m in pulled.requests]
        return [message.decode() for _, message in pulled.requests]

    async def seen(self, **limits: Any) -> list[str]:
        """The tokens at the front of the queue."""
        look = await self.pull(take=Take.NEVER, **limits)
        assert isinstance(look, Front)
        return [seen.id.partition("/")[2] for seen in look.front]

    async def finish(self, *tokens: str, executor: ExecutorId = ALICE) -> list[bool]:
        done = [WorkDone(request_id(GATEWAY, t), encode(ReplyMessage("1", error=f"answer {t}"))) for t in tokens]
        return (await self.call(self.work.finish(LOAD, executor, done))).answered

    async def answers(self) -> list[tuple[str, str]]:
        """(token, text) of every answer sent so far, in order."""
        stream = self.mesh.keys.replies(self.mesh.keys.home_shard(LOAD.model), GatewayId(GATEWAY))
        entries = await self.redis.xrange(stream)
        pairs = [pair for _, fields in entries for pair in fields.items() if pair[0] != b"opened"]
        return [(token.decode(), decode_reply(reply).error) for token, reply in pairs]

    async def refused(self, reason: str) -> int:
        """How many refused requests were counted with this reason."""
        return await self.counted(f"fail_{reason}")

    async def counted(self, name: str) -> int:
        """What the statistics were told of this count."""
        shard = self.mesh.keys.home_shard(LOAD.model)
        packed = await self.redis.lrange(self.mesh.keys.tally(shard, LOAD.model, LOAD.version, LOAD.generation), 0, -1)
        return sum(unpacked(data).get(name, 0) for data in packed)

    async def kept(self) -> dict[str, int]:
        """Entries of every key of the queue, without the counter of arrivals; keys that are gone are left out."""
        found: dict[str, int] = {}
        for name, key in self.keys._asdict().items():
            length = {b"zset": "zcard", b"hash": "hlen", b"list": "llen"}.get(await self.redis.type(key))
            if length:
                found[name] = await getattr(self.redis, length)(key)
        return found


@pytest.fixture
async def queue(redis: Redis, key_prefix: str) -> Queue:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    return Queue(mesh)


async def until_late(queue: Queue) -> None:
    """Returns when the first deadline in the queue is past."""
    while (first := await queue.redis.zrange(queue.keys.deadlines, 0, 0, withscores=True)) and (
        (now := await queue.redis.time())[0] * 1_000_000 + now[1] <= first[0][1]
    ):
        await asyncio.sleep(0.001)


class TestOrder:
    async def test_first_in_first_out_and_nothing_stays_of_what_was_answered(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c")

        assert ["a", "b"] == await queue.taken(requests=2)
        assert ["c"] == await queue.taken()
        assert [True] * 3 == await queue.finish("a", "b", "c")
        assert [("a", "answer a"), ("b", "answer b"), ("c", "answer c")] == await queue.answers()
        assert {"takers"} == set(await queue.kept())

    async def test_lower_levels_run_first(self, queue: Queue) -> None:
        for token, level in (("a", 2), ("b", 1), ("c", 10), ("d", 1)):
            await queue.enqueue(token, level=level)

        assert ["b", "d", "a", "c"] == await queue.taken()

    async def test_a_batch_ends_at_its_rows_and_where_shapes_differ(self, queue: Queue) -> None:
        await queue.enqueue("a", rows=3)
        await queue.enqueue("b", rows=2)
        await queue.enqueue("c", "d", shape="other")

        assert ["a"] == await queue.taken(rows=4)
        assert ["b"] == await queue.taken(rows=4)
        assert ["c", "d"] == await queue.taken(rows=4)

    async def test_a_request_with_more_rows_than_fit_runs_alone(self, queue: Queue) -> None:
        await queue.enqueue("a", rows=9)
        await queue.enqueue("b")

        assert ["a"] == await queue.taken(rows=4)


class TestBounds:
    async def test_a_full_queue_refuses_and_keeps_what_it_has(self, queue: Queue) -> None:
        assert [True, True, False] == await queue.enqueue("a", "b", "c", bound=2)
        assert ["a", "b"] == await queue.taken()

    async def test_a_level_has_its_own_bound_that_counts_the_delayed_too(self, queue: Queue) -> None:
        await queue.enqueue("a", level=1, timeout_us=1, delays=True)
        await until_late(queue)
        assert ["a"] == await queue.seen()

        assert [True, False] == await queue.enqueue("b", "c", level=1, level_bound=2)
        assert [True] == await queue.enqueue("d", level=12, level_bound=1)

    async def test_what_is_running_does_not_count(self, queue: Queue) -> None:
        await queue.enqueue("a", level_bound=1)
        await queue.taken()

        assert [True] == await queue.enqueue("b", level_bound=1)


class TestPolicies:
    async def test_reject_answers_what_is_late_and_counts_it(self, queue: Queue) -> None:
        await queue.enqueue("late", timeout_us=1)
        await queue.enqueue("patient")
        await until_late(queue)

        assert ["patient"] == await queue.taken()
        assert [("late", "Request timeout expired")] == await queue.answers()
        assert 1 == await queue.refused("REJECTED")

    async def test_a_sweep_applies_the_policies_and_takes_nothing(self, queue: Queue) -> None:
        await queue.enqueue("late", timeout_us=1)
        await queue.enqueue("patient", timeout_us=60_000_000)
        await until_late(queue)

        swept = await queue.pull(requests=0)

        assert isinstance(swept, Front)
        assert (1, ()) == (swept.queued, swept.front)
        assert swept.deadline_us is not None
        assert 0 < swept.deadline_us <= 60_000_000
        assert [("late", "Request timeout expired")] == await queue.answers()

    async def test_of_very_many_that_are_late_the_rest_is_due_at_once(self, queue: Queue) -> None:
        """One call handles 128 of them."""
        await queue.enqueue(*map(str, range(130)), timeout_us=1)
        await until_late(queue)

        swept = await queue.pull(requests=0)

        assert isinstance(swept, Front)
        assert (2, 0) == (swept.queued, swept.deadline_us)

    async def test_delay_runs_the_late_after_their_level_and_before_the_next_and_never_refuses_them(
        self, queue: Queue
    ) -> None:
        await queue.enqueue("late", "later", level=1, timeout_us=1, delays=True)
        await queue.enqueue("low", level=2)
        await until_late(queue)
        await queue.pull(requests=0)
        await queue.enqueue("other", level=1, timeout_us=60_000_000, delays=True)

        assert ["other", "late", "later", "low"] == await queue.taken()
        assert [] == await queue.answers()

    async def test_what_was_taken_in_time_is_not_late_any_more(self, queue: Queue) -> None:
        await queue.enqueue("a", timeout_us=60_000_000)
        assert ["a"] == await queue.taken()
        await queue.call(queue.work.requeue(LOAD, ALICE))

        assert [] == await queue.redis.zrange(queue.keys.deadlines, 0, -1)
        assert ["a"] == await queue.taken(BOB)


class TestPull:
    async def test_waits_for_the_delay_and_then_takes_what_came_meanwhile(self, queue: Queue) -> None:
        await queue.enqueue("a", "b")

        look = await queue.pull(delay_us=60_000_000)
        assert isinstance(look, Front)
        assert [1, 1] == [seen.rows for seen in look.front]
        assert 0 <= look.now_us - look.front[0].queued_us < 60_000_000
        await queue.enqueue("c")
        assert ["a", "b", "c"] == await queue.taken(delay_us=1)

    async def test_what_came_before_the_clock_was_set_back_has_waited_for_the_delay(self, queue: Queue) -> None:
        await queue.enqueue("a", "b")
        for id, meta in (await queue.redis.hgetall(queue.keys.meta)).items():
            place, arrived, *others = meta.split(b" ")
            later = b"%d" % (int(arrived) + 3_600_000_000)
            await queue.redis.hset(queue.keys.meta, id, b" ".join((place, later, *others)))

        look = await queue.pull(delay_us=60_000_000, take=Take.NEVER)
        assert isinstance(look, Front)
        assert [60_000_000] * 2 == [look.now_us - seen.queued_us for seen in look.front]
        assert ["a", "b"] == await queue.taken(delay_us=60_000_000, take=Take.WHEN_LATE)

    async def test_takes_at_once_what_cannot_grow(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c")

        assert ["a", "b"] == await queue.taken(rows=2, delay_us=60_000_000)
        assert isinstance(await queue.pull(rows=2, delay_us=60_000_000), Front)

    async def test_with_preferred_sizes_only_what_is_late_is_plain(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c")

        assert isinstance(await queue.pull(rows=2, take=Take.WHEN_LATE), Front)
        assert ["a", "b"] == await queue.taken(rows=2, delay_us=1, take=Take.WHEN_LATE)

    async def test_the_same_tag_gets_the_same_again(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c", "d")
        first = await queue.taken(requests=2, tag="x1")

        assert first == await queue.taken(requests=2, tag="x1")
        assert ["c"] == await queue.taken(requests=1, tag="x11")
        assert ["d"] == await queue.taken(BOB, requests=2, tag="x1")


class TestTake:
    async def test_takes_what_was_decided_or_nothing(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c")
        ids = [request_id(GATEWAY, token) for token in "abc"]

        taken = await queue.call(queue.work.take(LOAD, ALICE, "x", ids[:2]))
        again = await queue.call(queue.work.take(LOAD, ALICE, "x", ids[:2]))
        other = await queue.call(queue.work.take(LOAD, BOB, "y", ids[1:]))

        assert [b"a", b"b"] == [message for _, message in taken]
        assert taken == again
        assert () == other
        assert ["c"] == await queue.taken(BOB)

    async def test_messages_are_read_without_taking_and_those_that_are_gone_left_out(self, queue: Queue) -> None:
        await queue.enqueue("a")

        read = await queue.call(queue.work.read(LOAD, [request_id(GATEWAY, token) for token in "ab"]))

        assert [b"a"] == [message for _, message in read]
        assert ["a"] == await queue.seen()


class TestHolders:
    async def test_only_the_holder_answers_and_only_once(self, queue: Queue) -> None:
        await queue.enqueue("a")
        await queue.taken(ALICE)
        await queue.call(queue.work.requeue(LOAD, ALICE))
        assert ["a"] == await queue.taken(BOB)

        assert [False] == await queue.finish("a", executor=ALICE)
        assert [True] == await queue.finish("a", executor=BOB)
        assert [False] == await queue.finish("a", executor=BOB)
        assert [("a", "answer a")] == await queue.answers()

    async def test_what_was_held_goes_back_to_its_old_places(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c", level=1)
        await queue.taken(ALICE, requests=2)
        await queue.enqueue("urgent", level=0)

        assert [ALICE.encode()] == await queue.redis.hkeys(queue.keys.takers)
        assert 2 == await queue.call(queue.work.requeue(LOAD, ALICE))
        assert 0 == await queue.call(queue.work.requeue(LOAD, ALICE))
        assert [] == await queue.redis.hkeys(queue.keys.takers)
        assert ["urgent", "a", "b", "c"] == await queue.taken(BOB)

    async def test_what_kills_its_executors_is_answered_in_the_end_and_takes_others_down_only_twice(
        self, queue: Queue
    ) -> None:
        given_up = encode(ReplyMessage("1", error="given up"))

        async def dies(executor: ExecutorId) -> int:
            return await queue.call(queue.work.requeue(LOAD, executor, given_up=given_up))

        await queue.enqueue("bad", "good", "late", ordered=True)
        assert ["bad", "good"] == await queue.taken(requests=2)
        assert (2, 0) == (await dies(ALICE), await dies(ALICE))
        assert ["bad", "good", "late"] == await queue.taken(BOB)
        assert 3 == await dies(BOB)
        # Nobody shares a batch with those that two executors were lost with; leaving is no loss.
        for executor in (ALICE, BOB):
            assert ["bad"] == await queue.taken(executor)
            assert 1 == await queue.call(queue.work.requeue(LOAD, executor))
        assert ["bad"] == await queue.taken()
        assert ["good"] == await queue.taken(BOB)
        assert [True] == await queue.finish("good", executor=BOB)
        assert ["late"] == await queue.taken(BOB)
        assert 1 == await dies(ALICE)
        assert [True] == await queue.finish("late", executor=BOB)

        assert [("bad", "given up"), ("good", "answer good"), ("late", "answer late")] == await queue.answers()
        assert 1 == await queue.refused("BACKEND")
        assert {} == {name: size for name, size in (await queue.kept()).items() if name != "takers"}

    async def test_a_take_after_a_handover_gets_nothing_of_the_old(self, queue: Queue) -> None:
        await queue.enqueue("a")
        await queue.taken(ALICE, tag="x")
        await queue.call(queue.work.requeue(LOAD, ALICE))
        await queue.taken(BOB)

        assert isinstance(await queue.pull(ALICE, tag="x"), Front)

    async def test_a_request_that_is_sent_again_is_not_queued_twice(self, queue: Queue) -> None:
        await queue.enqueue("a")
        assert [True] == await queue.enqueue("a", bound=1)
        assert ["a"] == await queue.taken()
        assert [True] == await queue.enqueue("a")

        assert [] == await queue.seen()


class TestPreservedOrder:
    async def test_answers_leave_in_the_order_of_arrival(self, queue: Queue) -> None:
        await queue.enqueue("a", "b", "c", ordered=True)
        await queue.taken(ALICE, requests=1)
        await queue.taken(BOB)

        assert [True, True] == await queue.finish("c", "b", executor=BOB)
        assert [] == await queue.answers()
        assert [True] == await queue.enqueue("b", ordered=True)
        assert [True] == await queue.finish("a", executor=ALICE)
        assert ["a", "b", "c"] == [token for token, _ in await queue.answers()]
        assert {"takers"} == set(await queue.kept())

    async def test_what_is_refused_or_withdrawn_holds_up_nobody(self, queue: Queue) -> None:
        await queue.enqueue("late", timeout_us=1, ordered=True)
        await queue.enqueue("gone", "b", ordered=True)
        await queue.call(queue.work.take(LOAD, BOB, "x", [request_id(GATEWAY, "b")]))
        await queue.finish("b", executor=BOB)
        await until_late(queue)
        await queue.pull(requests=0)
        assert ["late"] == [token for token, _ in await queue.answers()]

        await queue.call(queue.work.withdraw(LOAD, GatewayId(GATEWAY), ["gone"], reply=encode(ReplyMessage("1"))))

        assert ["late", "gone", "b"] == [token for token, _ in await queue.answers()]


class TestWithdraw:
    async def test_what_waits_is_given_up_and_what_runs_runs_on(self, queue: Queue) -> None:
        await queue.enqueue("running", "waiting")
        await queue.taken(requests=1)
        cancelled = encode(ReplyMessage("1", error_code="CANCELLED"))
        call = queue.work.withdraw(LOAD, GatewayId(GATEWAY), ["running", "waiting", "unknown"], reply=cancelled)

        assert [False, True, False] == await queue.call(call)
        assert [False] * 3 == await queue.call(call)
        assert [("waiting", "")] == await queue.answers()
        assert 1 == await queue.refused("CANCELED")
        assert [True] == await queue.finish("running")

    @pytest.mark.parametrize("lost", [False, True], ids=["its executor leaves", "its executor is lost"])
    async def test_what_runs_does_not_run_again_for_callers_who_have_gone(self, queue: Queue, *, lost: bool) -> None:
        await queue.enqueue("gone", "wanted", ordered=True)
        await queue.taken(requests=2)
        await queue.call(queue.work.withdraw(LOAD, GatewayId(GATEWAY), ["gone"], reply=b""))

        assert 2 == await queue.call(queue.work.requeue(LOAD, ALICE, given_up=b"x" if lost else b""))

        assert ["wanted"] == await queue.taken(BOB)
        assert [True] == await queue.finish("wanted", executor=BOB)
        assert ["wanted"] == [token for token, _ in await queue.answers()]
        assert 1 == await queue.refused("CANCELED")
        assert {"takers"} == set(await queue.kept())

    async def test_what_waits_is_refused_when_it_is_late_and_what_was_taken_once_is_not(self, queue: Queue) -> None:
        await queue.enqueue("back", "running", "waiting", timeout_us=60_000_000)
        await queue.taken(BOB, requests=1)
        await queue.taken(requests=1)
        await queue.call(queue.work.requeue(LOAD, BOB))
        call = queue.work.refuse_late(LOAD, GatewayId(GATEWAY), ["back", "running", "waiting", "unknown"])

        assert [False, False, True, False] == await queue.call(call)
        assert [False] * 4 == await queue.call(call)
        assert [("waiting", "Request timeout expired")] == await queue.answers()
        assert 1 == await queue.refused("REJECTED")
        assert [True] == await queue.finish("running")
        assert ["back"] == await queue.taken()


async def test_what_waits_for_an_unloaded_version_is_refused_and_what_runs_runs_on(queue: Queue) -> None:
    await queue.enqueue("running", "a", "b", timeout_us=60_000_000)
    await queue.taken(requests=1)
    call = queue.work.refuse(LOAD, encode(ReplyMessage("1", error="gone")), at_most=1)

    assert [1, 1, 0] == [await queue.call(call) for _ in range(3)]
    assert [("a", "gone"), ("b", "gone")] == await queue.answers()
    assert 2 == await queue.refused("OTHER")
    assert [True] == await queue.finish("running")
    assert {"takers"} == set(await queue.kept())


class TestWakeUp:
    async def test_there_is_one_token_while_there_is_work_and_none_without(self, queue: Queue) -> None:
        await queue.enqueue("a", "b")
        await queue.enqueue("c")
        assert 1 == await queue.redis.llen(queue.keys.wake)
        assert await queue.redis.blpop([queue.keys.wake], timeout=1)

        await queue.taken(requests=1)
        assert 1 == await queue.redis.llen(queue.keys.wake)
        await queue.taken()
        assert 0 == await queue.redis.llen(queue.keys.wake)

    async def test_a_wake_up_is_passed_on_only_if_there_is_work(self, queue: Queue) -> None:
        await queue.call(queue.work.wake(LOAD))
        assert 0 == await queue.redis.llen(queue.keys.wake)
        await queue.enqueue("a")
        await queue.redis.delete(queue.keys.wake)

        await queue.call(queue.work.wake(LOAD))

        assert 1 == await queue.redis.llen(queue.keys.wake)

    async def test_what_a_dead_executor_held_wakes_another(self, queue: Queue) -> None:
        await queue.enqueue("a")
        await queue.taken()

        await queue.call(queue.work.requeue(LOAD, ALICE))

        assert 1 == await queue.redis.llen(queue.keys.wake)


async def test_queues_of_several_models_are_filled_in_one_call(queue: Queue, redis: Redis) -> None:
    keys = Keyspace(queue.mesh.keys.prefix, 1)
    work, scripts = WorkScripts(keys), Scripts(redis, keys)
    items = [WorkItem(model, "1", GATEWAY, f"{n}", b"m") for n, model in enumerate(("x", "y", "x"))]

    assert [True, True, False] == await scripts.run(work.enqueue(items, bound=1))
    assert [True] * 3 == await scripts.run(work.enqueue(items, bound=2))
    counts = [await queue.redis.zcard(keys.work_queue(model, "1").queue) for model in "xy"]
    assert [2, 1] == counts


async def test_any_number_of_answers_that_were_held_back_leave_together(queue: Queue) -> None:
    tokens = [f"t{number}" for number in range(4500)]
    for first in range(0, len(tokens), 500):
        await queue.enqueue(*tokens[first : first + 500], ordered=True)
        await queue.taken(requests=500, rows=500)
    for first in range(len(tokens), 0, -500):
        await queue.finish(*tokens[first - 500 : first])

    assert tokens == [token for token, _ in await queue.answers()]
    assert {"takers": 1} == await queue.kept()


async def test_answers_that_are_held_back_count_for_the_bound(queue: Queue) -> None:
    await queue.enqueue("a", "b", ordered=True)
    assert ["a", "b"] == await queue.taken()
    await queue.finish("b")

    assert [True, False] == await queue.enqueue("c", "d", bound=2, ordered=True)
    await queue.finish("a")
    assert [True] == await queue.enqueue("d", bound=2, ordered=True)


async def test_a_stored_answer_for_which_there_is_no_room_behind_others_counts_for_nothing(queue: Queue) -> None:
    lookup = Lookup("name", LOAD.generation, 0)
    item = WorkItem(LOAD.model, LOAD.version, GATEWAY, "again", b"m", Queueing(ordered=True), lookup)
    await queue.enqueue("first", ordered=True)
    await queue.taken()
    done = WorkDone(request_id(GATEWAY, "first"), b"answer", stored=Stored(lookup.name, 1000))
    await queue.call(queue.work.finish(LOAD, ALICE, [done]))
    await queue.enqueue("waits", ordered=True)

    assert [False] == await queue.call(queue.work.enqueue([item], bound=1))
    assert 0 == await queue.counted("cache_hit_count") == await queue.counted("success_count")
    assert [True] == await queue.call(queue.work.enqueue([item], bound=2))
    assert 1 == await queue.counted("cache_hit_count") == await queue.counted("success_count")


async def test_a_redis_without_memory_still_lets_answers_leave(private_server: EmbeddedRedis, key_prefix: str) -> None:
    redis = connect(private_server.url)
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "sum")
    await mesh.open()
    queue = Queue(mesh)
    await queue.enqueue("a", "b", ordered=True)
    assert ["a", "b"] == await queue.taken()

    await queue.redis.config_set("maxmemory", 1)
    assert [True, True] == [*await queue.finish("b"), *await queue.finish("a")]
    await queue.redis.config_set("maxmemory", 0)

    assert ["a", "b"] == [token for token, _ in await queue.answers()]
    assert {"takers": 1} == await queue.kept()
    await redis.aclose()
