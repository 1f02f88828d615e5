"""Quiet queues share one connection, and each is woken by its own token or by what lies in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

import executor.stateless.dozing
from executor.stateless.dozing import Dozing
from shared.store.connections.link import Link
from shared.store.keyspace import Keyspace, WorkKeys
from tests.executor.patience import PATIENCE_S, until

MANY = 100


class Noting(Link):
    """A connection that remembers what was sent."""

    made = 0
    sent: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        Noting.made += 1

    async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
        Noting.sent += map(tuple, commands)
        return await super().exchange(commands, blocking_s=blocking_s)


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "sent", [])
    monkeypatch.setattr(Noting, "made", 0)
    monkeypatch.setattr(executor.stateless.dozing, "Link", Noting)


@asynccontextmanager
async def running(redis: Any) -> AsyncGenerator[Dozing]:
    dozing = Dozing(redis)
    task = asyncio.create_task(dozing.run())
    try:
        yield dozing
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def queues(key_prefix: str) -> list[WorkKeys]:
    return [Keyspace(key_prefix).work_queue(f"m{number}", "1") for number in range(MANY)]


def doze(dozing: Dozing, queue: WorkKeys) -> asyncio.Task[bool]:
    return asyncio.create_task(dozing.doze(queue))


def pops() -> list[tuple[Any, ...]]:
    return [command for command in Noting.sent if command[0] == "BLPOP"]


async def until_popping(names: int) -> None:
    """Waits until a pop names so many queues."""
    await until(lambda: any(len(pop) == names + 2 for pop in pops()))


async def test_a_token_wakes_its_queue_and_no_other(redis: Any, key_prefix: str) -> None:
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        dozers = {queue: doze(dozing, queue) for queue in queues(key_prefix)}
        await until_popping(MANY)
        *others, called = dozers
        await redis.rpush(called.wake, "1")

        assert await dozers[called]
        assert not any(dozers[other].done() for other in others)
        for other in others:
            dozers[other].cancel()
        await until(lambda: not any(part._dozers for part in dozing._parts.values()), "they are forgotten")
    assert 0 == await redis.exists(called.wake)


async def test_a_queue_that_is_not_empty_is_woken_without_a_token(redis: Any, key_prefix: str) -> None:
    """An executor has died with the token."""
    first, second = queues(key_prefix)[:2]
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        dozers = {queue: doze(dozing, queue) for queue in (first, second)}
        await until_popping(2)
        await redis.zadd(second.queue, {"request": 0})

        assert not await dozers[second], "it took no token"
        assert not dozers[first].done()
        dozers[first].cancel()
    await redis.delete(second.queue)


async def test_a_queue_that_begins_to_doze_need_not_wait_for_the_end_of_a_pop(
    redis: Any, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.stateless.dozing, "LOOK_S", 600)
    first, second = queues(key_prefix)[:2]
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        waiting = doze(dozing, first)
        await until_popping(1)
        new = doze(dozing, second)
        await until_popping(2)
        await redis.rpush(second.wake, "1")

        assert await new
        assert not waiting.done()
        waiting.cancel()


async def test_queues_may_begin_to_doze_at_any_moment(redis: Any, key_prefix: str) -> None:
    """Also between the moment when another has ended the pop and the end of it."""
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        dozers: dict[WorkKeys, asyncio.Task[bool]] = {}
        for number, queue in enumerate(queues(key_prefix)):
            if number and not number % 10:
                await until_popping(number)
            dozers[queue] = doze(dozing, queue)
            await asyncio.sleep(0)
        await until_popping(MANY)
        for queue, dozer in dozers.items():
            await redis.rpush(queue.wake, "1")
            assert await dozer


async def test_a_token_that_came_before_is_not_missed(redis: Any, key_prefix: str) -> None:
    (queue, *_) = queues(key_prefix)
    await redis.rpush(queue.wake, "1")
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        assert await doze(dozing, queue)


async def test_after_a_lost_connection_they_are_woken_as_before(redis: Any, key_prefix: str) -> None:
    (queue, *_) = queues(key_prefix)
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        waiting = doze(dozing, queue)
        await until_popping(1)
        killed = 0
        while not killed:  # it was sent; it may not have come
            for client in await redis.client_list():
                if client["cmd"] == "blpop":
                    killed += await redis.client_kill_filter(_id=client["id"])
        await redis.rpush(queue.wake, "1")

        assert await waiting


async def test_many_queues_cost_as_many_connections_and_commands_as_one(redis: Any, key_prefix: str) -> None:
    async with running(redis) as dozing, asyncio.timeout(PATIENCE_S):
        dozers = [doze(dozing, queue) for queue in queues(key_prefix)]
        await until_popping(MANY)
        # A second may have passed since that pop.
        begun = 1 + [len(command) for command in Noting.sent].index(MANY + 2)
        while len(Noting.sent) < begun + 4:
            await asyncio.sleep(0.01)
        looks = Noting.sent[begun : begun + 4]
        for dozer in dozers:
            dozer.cancel()

    assert 1 == Noting.made
    assert [("EXISTS", MANY + 1), ("BLPOP", MANY + 2)] * 2 == [(command[0], len(command)) for command in looks]
