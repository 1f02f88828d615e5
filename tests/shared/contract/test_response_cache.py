"""The response cache: which requests are equal, what its option means, and its scripts on the real server."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
import pytest

from shared.contract.batch_shape import Queueing
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.messages import InferMessage
from shared.contract.response_cache import entry_name, parse_cache_config, request_digest
from shared.contract.tensors import Tensor
from shared.statistics.metrics_config import sketch_bucket
from shared.statistics.tally import ModelLoad, added, unpacked
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.scripts import Scripts
from shared.store.work_scripts import Lookup, Stored, Take, Taken, WorkDone, WorkItem, WorkScripts

# -- keys --------------------------------------------------------------------------------------------------------------

A, B = Tensor("A", "INT32", (1,), b"\1\0\0\0"), Tensor("B", "INT32", (1,), b"\2\0\0\0")
MESSAGE = InferMessage("m", "1", "id", 0, (A, B), ("X", "Y"), parameters={"p": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"version": "2"},
        {"inputs": (A,)},
        {"inputs": (A, msgspec.structs.replace(B, raw=b"\3\0\0\0"))},
        {"inputs": (A, msgspec.structs.replace(B, name="C"))},
        {"inputs": (A, msgspec.structs.replace(B, datatype="FP32"))},
        {"inputs": (A, msgspec.structs.replace(B, shape=(1, 1)))},
        {"inputs": (msgspec.structs.replace(A, raw=B.raw), msgspec.structs.replace(B, raw=A.raw))},
        {"outputs": ("X",)},
        {"outputs": ()},
        {"parameters": {}},
        {"parameters": {"p": 2}},
        {"parameters": {"p": "1"}},
        {"parameters": {"q": 1}},
        {"flags": 1},
        {"correlation_id": 7},
        {"correlation_id": "0"},
    ],
    ids=str,
)
def test_what_an_answer_depends_on_makes_requests_different(change: dict[str, Any]) -> None:
    assert request_digest(MESSAGE) != request_digest(msgspec.structs.replace(MESSAGE, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"priority": 1},
        {"timeout_us": 1},
        {"traceparent": "00-1"},
        {"arrived_ns": 1},
        {"keep_reply": True},
        {"inputs": (B, A)},
        {"outputs": ("Y", "X")},
        {"parameters": {"p": 1}},
    ],
    ids=str,
)
def test_what_no_answer_depends_on_leaves_them_equal(change: dict[str, Any]) -> None:
    assert request_digest(MESSAGE) == request_digest(msgspec.structs.replace(MESSAGE, **change))


def test_bytes_do_not_run_from_one_input_into_the_next() -> None:
    def digest(first: bytes, second: bytes) -> str:
        inputs = (Tensor("A", "BYTES", (1,), first), Tensor("B", "BYTES", (1,), second))
        return request_digest(msgspec.structs.replace(MESSAGE, inputs=inputs))

    assert digest(b"ab", b"c") != digest(b"a", b"bc")


def test_parameters_count_in_any_order() -> None:
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}

    digests = {request_digest(msgspec.structs.replace(MESSAGE, parameters=each)) for each in (one, other)}

    assert 1 == len(digests)


def test_answers_of_other_files_and_loads_have_other_names() -> None:
    names = {entry_name(*parts) for parts in (("s", "1", "d"), ("t", "1", "d"), ("s", "2", "d"), ("s", "1", "e"))}

    assert 4 == len(names)


def test_the_option_is_tritons() -> None:
    assert (0, 1, 1048576) == tuple(parse_cache_config(text) for text in ("", "local,size=1", "local,size=1048576"))


@pytest.mark.parametrize("text", ["local", "redis,size=1", "local,size=0", "local,size=x", "local,bytes=1", "size=1"])
def test_an_option_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not 'local,size=<bytes>'"):
        parse_cache_config(text)


# -- scripts -----------------------------------------------------------------------------------------------------------

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
GATEWAY = GatewayId("g")
LOAD = ModelLoad("sum", "1", "g1")
AGE_NS = 5_000_000_000
"""Requests arrived at their gateway so long ago: every duration is more than nothing."""


class Cached:
    """A work queue with a cache, under short names: what is asked is the name in the cache, and the answer to it."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self.redis = cast(Any, redis)
        self.keys = keys
        self.scripts = Scripts(redis, keys)
        self.work = WorkScripts(keys)
        self.shard = keys.home_shard(LOAD.model)
        self._tokens = 0

    async def ask(self, *names: str, ordered: bool = False, bound: int = 0, summaries: bool = False) -> list[Any]:
        """Requests, in one call; a name may be repeated."""
        return await self.send(self.items(*names, ordered=ordered), bound=bound, summaries=summaries)

    def items(self, *names: str, ordered: bool = False) -> list[WorkItem]:
        """New requests. "": one that is not looked up."""
        found: list[WorkItem] = []
        for name in names:
            self._tokens += 1
            lookup = Lookup(name, LOAD.generation, time.time_ns() - AGE_NS) if name else None
            token = str(self._tokens)
            found.append(
                WorkItem(
                    LOAD.model, "1", GATEWAY, token, name.encode(), queueing=Queueing(ordered=ordered), lookup=lookup
                )
            )
        return found

    async def send(self, items: list[WorkItem], *, bound: int = 0, summaries: bool = False) -> list[Any]:
        """One call."""
        return await self.scripts.run(self.work.enqueue(items, bound=bound, summaries=summaries))

    async def hold(self, executor: ExecutorId = ALICE) -> Taken:
        """An executor takes all that waits."""
        pulled = await self.scripts.run(
            self.work.pull(
                LOAD,
                executor,
                f"t{self._tokens}",
                requests_max=100,
                rows_max=100,
                delay_us=0,
                take=Take.WHEN_PLAIN,
            )
        )
        assert isinstance(pulled, Taken), pulled
        return pulled

    async def answer(self, taken: Taken, *, bound: int = 1000, size: int = 0, executor: ExecutorId = ALICE) -> None:
        """Answers what was taken, each as it is called, filled up to `size` bytes."""
        done = [
            WorkDone(id, name.ljust(size, b"."), stored=Stored(name.decode(), bound) if name else None)
            for id, name in taken.requests
        ]
        await self.scripts.run(self.work.finish(LOAD, executor, done))

    async def compute(self, *names: str, bound: int = 1000, size: int = 0) -> None:
        """Asks, and has it answered; what the cache knows is not asked for."""
        await self.ask(*names)
        await self.answer(await self.hold(), bound=bound, size=size)

    async def known(self, *names: str) -> str:
        """Those of the names that the cache holds now; does not count as a use."""
        return "".join([name for name in names if await self.redis.hexists(self.keys.cache(self.shard).entries, name)])

    async def bytes(self) -> int:
        """What the cache believes to hold."""
        return int(await self.redis.hget(self.keys.cache(self.shard).about, "bytes") or 0)

    async def counts(self) -> dict[str, int]:
        """Everything counted so far."""
        tally = self.keys.tally(self.shard, LOAD.model, LOAD.version, LOAD.generation)
        return added([unpacked(one) for one in await self.redis.lrange(tally, 0, -1)])

    async def sent(self) -> list[str]:
        """Answers in the reply stream, in order."""
        entries = await self.redis.xrange(self.keys.replies(self.shard, GATEWAY))
        return [reply.decode() for _, fields in entries for token, reply in fields.items() if token != b"opened"]


@pytest.fixture
async def cached(redis: Redis, key_prefix: str) -> Cached:
    """An empty cache, of a gateway that listens."""
    keys = Keyspace(key_prefix)
    made = Cached(redis, keys)
    stream = keys.replies(made.shard, GATEWAY)
    await made.redis.xadd(stream, {"opened": ""})
    await made.redis.pexpire(stream, 600_000)
    return made


async def test_what_was_answered_is_answered_again_without_being_queued(cached: Cached) -> None:
    assert [True, True] == await cached.ask("a", "b")
    await cached.answer(await cached.hold())

    assert [b"a", True, b"b"] == await cached.ask("a", "c", "b")
    assert [b"c"] == [message for _, message in (await cached.hold()).requests]


async def test_a_request_that_is_not_looked_up_is_never_answered_from_the_cache(cached: Cached) -> None:
    await cached.compute("", "a")

    assert [True, b"a"] == await cached.ask("", "a")


async def test_lookups_are_counted_with_what_they_find(cached: Cached) -> None:
    await cached.compute("a")
    await cached.ask("a", "a", "b")

    counts = await cached.counts()
    times = {name: counts.pop(f"{name}_ns") for name in ("success", "cache_hit", "cache_miss")}
    assert {"success_count": 2, "cache_hit_count": 2, "cache_miss_count": 2} == counts
    assert times["success"] == times["cache_hit"] > 0
    assert times["cache_miss"] > 0


async def test_lookups_count_for_summaries_where_these_are_wanted(cached: Cached) -> None:
    await cached.compute("a")
    (item,) = cached.items("a")
    before = await cached.counts()

    assert [b"a"] == await cached.send([item], summaries=True)

    counts = await cached.counts()
    us = (counts["cache_hit_ns"] - before.get("cache_hit_ns", 0)) // 1000
    found = {name: count for name, count in counts.items() if name.startswith("sketch:")}
    bucket = sketch_bucket(us)
    assert {f"sketch:request:{bucket}": 1, "sketch:queue:0": 1, f"sketch:cache_hit:{bucket}": 1} == found


async def test_a_call_that_is_sent_again_queues_and_counts_nothing_twice(cached: Cached) -> None:
    items = cached.items("a", "b")

    assert [True, True] == await cached.send(items)
    assert [True, True] == await cached.send(items)

    assert 2 == (await cached.counts())["cache_miss_count"]
    taken = await cached.hold()
    assert 2 == len(taken.requests)
    await cached.answer(taken)
    await cached.answer(taken)
    assert ["a", "b"] == await cached.sent()
    assert len("aabb") == await cached.bytes()


async def test_a_hit_needs_no_place_in_a_full_queue(cached: Cached) -> None:
    await cached.compute("a")
    await cached.ask("b")

    assert [b"a", False] == await cached.ask("a", "c", bound=1)


async def test_only_the_holders_answer_is_stored(cached: Cached) -> None:
    await cached.ask("a")
    taken = await cached.hold(ALICE)

    await cached.answer(taken, executor=BOB)
    assert "" == await cached.known("a")
    await cached.answer(taken, executor=ALICE)
    assert "a" == await cached.known("a")


async def test_those_not_used_for_longest_make_room(cached: Cached) -> None:
    for name in "abc":
        await cached.compute(name, bound=30, size=9)
    assert ("abc", 30) == (await cached.known(*"abcd"), await cached.bytes())

    assert [b"a........"] == await cached.ask("a")
    await cached.compute("d", bound=30, size=9)
    assert ("acd", 30) == (await cached.known(*"abcd"), await cached.bytes())

    await cached.compute("e", bound=30, size=19)
    assert ("de", 30) == (await cached.known(*"abcde"), await cached.bytes())
    assert 3 == int(await cached.redis.hget(cached.keys.cache(cached.shard).about, "evicted"))


async def test_of_very_many_small_ones_a_thousand_make_room_in_one_call(cached: Cached) -> None:
    """Redis serves nobody else meanwhile."""
    cache = cached.keys.cache(cached.shard)
    await cached.compute("a", bound=30, size=9)
    names = [f"{number:09}" for number in range(1_500)]
    await cached.redis.hset(cache.entries, mapping=dict.fromkeys(names, "x"))
    await cached.redis.zadd(cache.used, {name: number for number, name in enumerate(names)})
    await cached.redis.hincrby(cache.about, "bytes", 10 * len(names))

    await cached.compute("b", bound=30, size=9)
    assert ("a", 10 + 10 * 500) == (await cached.known("a", "b"), await cached.bytes())
    await cached.compute("c", bound=30, size=9)
    assert ("ac", 30) == (await cached.known("a", "b", "c"), await cached.bytes())


async def test_an_answer_larger_than_the_cache_is_not_stored_and_drives_nobody_out(cached: Cached) -> None:
    await cached.compute("a", bound=30, size=9)
    await cached.compute("b", bound=30, size=30)

    assert ("a", 10) == (await cached.known("a", "b"), await cached.bytes())


async def test_an_answer_that_is_stored_again_takes_its_own_place(cached: Cached) -> None:
    await cached.ask("a", "a")
    await cached.answer(await cached.hold(), bound=30, size=19)

    assert ("a", 20) == (await cached.known("a"), await cached.bytes())


async def test_a_cache_of_which_a_part_is_lost_begins_anew(cached: Cached) -> None:
    for lost in cached.keys.cache(cached.shard):
        await cached.compute("a")
        await cached.redis.delete(lost)
        await cached.compute("b")
        assert ("b", 2) == (await cached.known("a", "b"), await cached.bytes())
        await cached.redis.delete(*cached.keys.cache(cached.shard))


async def test_a_cache_that_says_to_hold_less_than_nothing_begins_anew(cached: Cached) -> None:
    """It would grow beyond its bound."""
    await cached.compute("a")
    await cached.redis.hset(cached.keys.cache(cached.shard).about, "bytes", -1000)

    await cached.compute("b")

    assert ("b", 2) == (await cached.known("a", "b"), await cached.bytes())


async def test_where_answers_leave_in_order_a_hit_waits_for_those_before_it(cached: Cached) -> None:
    await cached.compute("a")

    assert [True, True, True] == await cached.ask("b", "a", "c", ordered=True)
    assert ["a"] == await cached.sent()

    await cached.answer(await cached.hold())
    assert ["a", "b", "a", "c"] == await cached.sent()


async def test_where_answers_leave_in_order_the_first_is_sent_at_once(cached: Cached) -> None:
    await cached.compute("a")
    items = cached.items("a", ordered=True)

    assert [True] == await cached.send(items)
    assert ["a", "a"] == await cached.sent()

    work = cached.keys.work_queue(LOAD.model, LOAD.version)
    assert 0 == await cached.redis.exists(work.order, work.early)
