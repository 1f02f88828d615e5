"""Commands about models, over a real Redis, with a loader that the test stands for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from executor.lease import control
from executor.lease.control import Control
from shared.contract.errors import LoadError
from shared.contract.messages import ControlMessage, encode
from shared.process.lifecycle import end
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace

OLD, NEW = ControlMessage("load", "sum", generation="1"), ControlMessage("load", "sum", generation="2")


class Loads:
    """In place of loader and repository. loads: generations"""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.fails = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def note_load(self, name: str) -> None: ...

    def never_loaded(self, name: str) -> None: ...

    def unload(self, name: str) -> None:
        self.unloads.append(name)

    async def load(self, name: str, config: str, files: Any, generation: str, *, limit_s: float) -> Any:
        self.loads.append(generation)
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


async def test_a_load_that_takes_long_holds_up_the_unload_of_no_other_model(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked behind that is carried out again in its turn."""
    monkeypatch.setattr(control, "LONG_S", 0.0)
    keys, loads = Keyspace(key_prefix), Loads()
    loads.goes_on.clear()
    stands_for: Any = loads
    connections: Any = SimpleNamespace(commands=redis, blocking=redis, keys=keys)
    changed = asyncio.Event()
    commands = Control(connections, stands_for, stands_for, changed)
    await redis.hset(keys.wanted, "sum", encode(NEW))
    await redis.xadd(keys.control, {"n": "sum"})
    running = asyncio.create_task(commands.run())
    for message in (ControlMessage("unload", "other"), ControlMessage("load", "third", generation="3")):
        await redis.hset(keys.wanted, message.model, encode(message))
        last = await redis.xadd(keys.control, {"n": message.model})

    while not loads.unloads:
        await asyncio.sleep(0.01)
    assert (["other"], ["2"]) == (loads.unloads, loads.loads)
    assert changed.is_set()
    loads.goes_on.set()
    while commands.applied.position != last.decode():
        await asyncio.sleep(0.01)
    assert (["other", "other"], ["2", "3"]) == (loads.unloads, loads.loads)
    assert not commands.applied.failures
    await end((running,))
    await redis.delete(keys.kept, keys.wanted, keys.control)
