"""Commands about models, over a real Redis, with a loader that the test stands for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from executor.lease.control import Control
from shared.contract.errors import LoadError
from shared.contract.messages import ControlMessage, encode
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace

OLD, NEW = ControlMessage("load", "sum", generation="1"), ControlMessage("load", "sum", generation="2")


class Loads:
    """In place of loader and repository. loads: generations"""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.fails = False

    def note_load(self, name: str) -> None: ...

    async def load(self, name: str, config: str, files: Any, generation: str, *, limit_s: float) -> Any:
        self.loads.append(generation)
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
