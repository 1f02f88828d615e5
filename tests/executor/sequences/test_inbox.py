"""The inbox: what is read of it is bounded in bytes, and nothing that is needed to go on stays unread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor.lease import intake
from executor.lease.intake import take_in
from executor.lease.serving import Serving
from executor.sequences import inbox as module
from executor.sequences.inbox import FIRST_COUNT, READ_BYTES, Inbox, next_count
from shared.contract.ids import ExecutorId, ShardId
from shared.contract.messages import InboxExpired, InboxStep, InferMessage, encode
from shared.contract.tensors import Tensor
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.executor.patience import PATIENCE_S, until

EXECUTOR = ExecutorId("a-1")


class Held:
    """Keeps what was taken in, until the test says otherwise."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.is_busy = True
        self.changed = asyncio.Event()

    @property
    def queued_bytes(self) -> int:
        return sum(self.sizes)

    def tell(self, entry: InboxExpired) -> Sequence[str]:
        return ()

    def accept(self, step: InboxStep, message: InferMessage) -> Sequence[str]:
        self.sizes.append(len(message.inputs[0].raw))
        self.changed.set()
        return ()

    def taken(self) -> None: ...

    async def holds(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.sizes) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    redis = connect(redis_url)
    yield redis
    await redis.aclose()


@pytest.fixture
def keys(key_prefix: str) -> Keyspace:
    return Keyspace(key_prefix, 1)


@asynccontextmanager
async def reading(redis: Redis, keys: Keyspace, held: Held, *, bytes_max: int = 1 << 30) -> AsyncGenerator[str]:
    """An inbox that is read; gives its name."""
    connections: Any = SimpleNamespace(blocking=redis, commands=redis, keys=keys)
    inbox = Inbox(connections, EXECUTOR)
    task = asyncio.create_task(take_in(inbox, cast("Serving", held), bytes_max=bytes_max))
    name = keys.inbox(ShardId(0), EXECUTOR)
    try:
        yield name
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await redis.unlink(name)


STEP = {"a": "1 1 g t m||i7", "o": "1 0 0 0 1"}


async def add(redis: Redis, name: str, *sizes: int) -> None:
    for size in sizes:
        message = InferMessage("m", "1", "", 7, (Tensor("INPUT", "UINT8", (size,), bytes(size)),))
        await redis.xadd(name, {**STEP, "m": encode(message)})


async def holds_entries(redis: Redis, name: str, count: int) -> None:
    """Waits until the inbox has that many entries: what is done leaves it after the read that brought it."""
    async with asyncio.timeout(PATIENCE_S):
        while count != len(await redis.xrange(name)):
            await asyncio.sleep(0.01)


async def add_expired(redis: Redis, name: str) -> None:
    await redis.xadd(name, {"k": "expired", "q": "m||i7", "e": 1})


@pytest.mark.parametrize(
    ("count", "largest", "expected"),
    [
        (16, 100, 64),
        (64, 100, 256),
        (256, 100, 512),
        (512, 0, 512),
        (512, READ_BYTES // 8, 8),
        (8, 64 << 20, 1),
        (1, 9, 4),
    ],
)
def test_a_read_asks_for_what_will_be_no_more_than_its_bytes(count: int, largest: int, expected: int) -> None:
    assert expected == next_count(count, largest)


def test_entries_of_any_one_size_are_soon_read_within_the_bound() -> None:
    for size in (1, 1000, 1 << 20, READ_BYTES // 2, READ_BYTES):
        count = FIRST_COUNT
        for _ in range(4):
            count = next_count(count, size)
        assert count * size <= READ_BYTES


async def test_a_read_of_many_inboxes_is_within_the_bound_as_a_whole(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 8000)
    keys = Keyspace(key_prefix, 4)
    connections: Any = SimpleNamespace(blocking=redis, commands=redis, keys=keys)
    names = [keys.inbox(shard, EXECUTOR) for shard in keys.shards]
    for name in names:
        await add(redis, name, *[900] * (FIRST_COUNT + 16))
    sizes: list[int] = []
    (part,) = Inbox(connections, EXECUTOR).parts
    async with aclosing(part.reads()) as reads, asyncio.timeout(PATIENCE_S):
        async for read in reads:
            sizes.append(sum(len(field) for entries in read.values() for _, flat in entries for field in flat))
            if len(sizes) == 3:
                break

    # Of the first read nothing is known yet.
    assert all(0 < size <= 8000 for size in sizes[1:]), sizes
    await redis.unlink(*names)


async def test_while_nothing_comes_the_last_read_is_not_kept() -> None:
    class Taken(dict[str, Any]):
        """As a read, but it can be referred to weakly."""

    kept: list[weakref.ref[Taken]] = []

    def taken() -> Taken:
        read = Taken()
        kept.append(weakref.ref(read))
        return read

    async def reads() -> AsyncGenerator[Taken]:
        yield taken()
        await asyncio.Event().wait()

    inbox: Any = SimpleNamespace(parts=[SimpleNamespace(reads=reads)])
    task = asyncio.create_task(take_in(inbox, cast("Serving", Held()), bytes_max=1))

    await until(lambda: kept and kept[0]() is None, "it is gone")
    task.cancel()
    await asyncio.wait([task])


async def test_beyond_the_bound_nothing_is_read_until_there_is_room(
    redis: Redis, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_COUNT", 1)
    monkeypatch.setattr(module, "READ_BYTES", 100)
    monkeypatch.setattr(intake, "PATIENCE_S", PATIENCE_S)
    held = Held()
    async with reading(redis, keys, held, bytes_max=250) as name:
        await add(redis, name, *[100] * 6)
        await held.holds(3)
        for _ in range(20):
            await asyncio.sleep(0)
            await redis.ping()
        assert [100] * 3 == held.sizes

        held.sizes.pop()
        held.sizes.pop()
        await held.holds(3)
        assert [100] * 3 == held.sizes


@pytest.mark.parametrize("stuck", ["nothing of it can run", "a model hangs"])
async def test_what_may_be_needed_to_go_on_is_read_beyond_the_bound(
    redis: Redis, keys: Keyspace, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    held = Held()
    held.is_busy = stuck == "a model hangs"
    monkeypatch.setattr(intake, "PATIENCE_S", 0.05 if held.is_busy else PATIENCE_S)
    async with reading(redis, keys, held, bytes_max=50) as name:
        await add(redis, name, 100)
        await held.holds(1)
        await add_expired(redis, name)
        await add(redis, name, 100)
        await held.holds(2)

        await holds_entries(redis, name, 2)
