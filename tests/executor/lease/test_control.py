"""Commands about models, over a real Redis, with a loader that the test stands for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from executor.lease.control import Control
from shared.contract.errors import LoadError
from shared.contract.ids import entry_key
from shared.contract.messages import ControlMessage, encode
from shared.process.lifecycle import end
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from tests.executor.patience import PATIENCE_S, until

Command = Callable[[ControlMessage], Awaitable[str]]

OLD, NEW = ControlMessage("load", "sum", generation="1"), ControlMessage("load", "sum", generation="2")


class Loads:
    """In place of loader and repository. loads: generations; hang: those that go on when they are let"""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.fails = False
        self.hang = {"1", "2", "3"}
        self.goes_on = asyncio.Event()

    def note_load(self, name: str) -> None: ...

    def never_loaded(self, name: str) -> None: ...

    def unload(self, name: str) -> None:
        self.unloads.append(name)

    async def load(self, name: str, config: str, files: Any, generation: str, *, limit_s: float) -> Any:
        self.loads.append(generation)
        if generation in self.hang:
            await self.goes_on.wait()
        if self.fails and generation == NEW.generation:
            raise LoadError("broken")
        return SimpleNamespace(record=SimpleNamespace(generation=generation))


@pytest.mark.parametrize(("fails", "next_time"), [(False, ["2"]), (True, ["1", "2"])])
async def test_a_command_that_only_executors_hear_that_start_later_is_kept_if_it_can_be_carried_out(
    redis: Redis, key_prefix: str, *, fails: bool, next_time: list[str]
) -> None:
    """None was there when it was given. Else each later one would load first what was there before."""
    keys, loads = Keyspace(key_prefix), Loads()
    loads.fails = fails
    loads.goes_on.set()
    await redis.hset(keys.kept, "sum", encode(OLD))
    await redis.hset(keys.wanted, "sum", encode(NEW))
    stands_for: Any = loads
    connections: Any = SimpleNamespace(commands=redis, blocking=redis, keys=keys)

    await Control(connections, stands_for, stands_for, asyncio.Event()).catch_up()
    assert ["1", "2"] == loads.loads
    loads.loads.clear()
    await Control(connections, stands_for, stands_for, asyncio.Event()).catch_up()

    assert next_time == loads.loads
    await redis.delete(keys.kept, keys.wanted)


@asynccontextmanager
async def commanded(redis: Redis, keys: Keyspace, loads: Loads) -> AsyncGenerator[tuple[Control, Command]]:
    """What carries commands out, and what gives one: the id of its entry."""

    async def give(message: ControlMessage) -> str:
        await redis.hset(keys.wanted, message.model, encode(message))
        return (await redis.xadd(keys.control, {"n": message.model})).decode()

    stands_for: Any = loads
    connections: Any = SimpleNamespace(commands=redis, blocking=redis, keys=keys)
    control = Control(connections, stands_for, stands_for, asyncio.Event())
    running = asyncio.create_task(control.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield control, give
    finally:
        await end((running,))
        await redis.delete(keys.kept, keys.wanted, keys.control)


async def test_a_load_that_takes_long_holds_up_the_unload_of_no_other_model(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for the unload hears of it at once, and the load behind it waits for its turn."""
    hget = redis.hget

    async def late(key: str, model: str) -> Any:
        if model == NEW.model:
            await asyncio.sleep(0.1)
        return await hget(key, model)

    monkeypatch.setattr(redis, "hget", late)
    loads = Loads()
    async with commanded(redis, Keyspace(key_prefix), loads) as (control, give):
        first = await give(NEW)
        unload = await give(ControlMessage("unload", "other"))
        third = await give(ControlMessage("load", "third", generation="3"))

        await until(lambda: bool(control.applied.beyond))
        assert (["other"], ["2"]) == (loads.unloads, loads.loads)
        assert (unload,) == control.applied.beyond
        assert entry_key(control.applied.position) < entry_key(first)
        loads.goes_on.set()
        await until(lambda: control.applied.position == third)
        assert (["other"], ["2", "3"], ()) == (loads.unloads, loads.loads, control.applied.beyond)
        assert not control.applied.failures


async def test_a_load_that_hangs_holds_up_no_other_for_long_and_those_of_its_own_model(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.lease.control.SLOW_S", 0.01)
    loads = Loads()
    loads.hang = {"1"}
    async with commanded(redis, Keyspace(key_prefix), loads) as (control, give):
        await give(OLD)
        await until(lambda: ["1"] == loads.loads)
        other = await give(ControlMessage("load", "other", generation="3"))
        await until(lambda: control.applied.beyond == (other,))

        loads.fails = True
        newer = await give(NEW)
        await give(ControlMessage("unload", "sum"))
        await until(lambda: 4 == len(control._open) + len(control.applied.beyond))
        assert (["1", "3"], []) == (loads.loads, loads.unloads)
        loads.goes_on.set()
        await until(lambda: not control._open)
        # The latest command about the model counted for the one before it, too.
        assert (["1", "3"], ["sum", "sum"]) == (loads.loads, loads.unloads)
        assert entry_key(newer) < entry_key(control.applied.position)


async def test_what_is_told_of_commands_behind_one_that_hangs_is_bounded(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.lease.control.OPEN_MAX", 3)
    loads = Loads()
    async with commanded(redis, Keyspace(key_prefix), loads) as (control, give):
        await give(NEW)
        names = [f"other{number}" for number in range(8)]
        entries = [await give(ControlMessage("unload", name)) for name in names]
        await until(lambda: len(loads.unloads) >= 2)
        await asyncio.sleep(0.1)
        assert len(control.applied.beyond) < 2 * 3
        loads.goes_on.set()
        await until(lambda: control.applied.position == entries[-1])
        assert names == sorted(loads.unloads)


async def test_commands_that_redis_cannot_be_asked_for_are_carried_out_when_it_can(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nobody is told that they were."""
    hget, lost = redis.hget, [RedisConnectionError("gone")]

    async def may_fail(*asked: Any) -> Any:
        if lost:
            raise lost.pop()
        return await hget(*asked)

    loads = Loads()
    loads.goes_on.set()
    monkeypatch.setattr(redis, "hget", may_fail)
    monkeypatch.setattr("executor.lease.control.BLOCK_MS", 10)
    async with commanded(redis, Keyspace(key_prefix), loads) as (control, give):
        entry = await give(NEW)
        await until(lambda: not lost)
        assert [] == loads.loads

        await until(lambda: control.applied.position == entry)
        assert ["2"] == loads.loads
