"""Loads that end their process: what counts as one, against whom, and when a load is given up."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from executor.connections import RedisConnections
from executor.models.loader import ROUNDS_MAX, SILENT_MS, SUCCESS, LoadAttempt, Loader
from executor.workers.devices import DeviceLostError
from shared.contract.errors import LoadError
from shared.process.lifecycle import Stop, Tasks
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis
from tests.executor.living import SHARDS

GIVEN_UP = r"load of model 'm' ended 3 executors and is given up"


@dataclass
class Models:
    """In place of a repository: its one model's load does what the test says."""

    error: BaseException | None = None
    gate: threading.Event | None = None
    loads: int = 0
    refused: dict[str, str] = field(default_factory=dict[str, str])
    unloaded: list[str] = field(default_factory=list[str])

    def load(self, name: str, *_: object) -> str:
        gate = self.gate  # that of now: the test may take it away once the load has begun
        self.loads += 1
        if gate is not None:
            assert gate.wait(60)
        if self.error is not None:
            raise self.error
        return name

    def refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason

    def unload(self, name: str) -> None:
        self.unloaded.append(name)

    def folder(self, _name: str) -> None: ...


class Host:
    """One executor name on one machine, whose processes come one after the other."""

    def __init__(self, connections: RedisConnections, models: Models, name: str) -> None:
        self.models = models
        self.stop = Stop()
        self.changed = asyncio.Event()
        tasks = Tasks(cast("Any", asyncio))
        self.loader = Loader(cast("Any", models), connections, name, self.stop, tasks, self.changed)

    async def load(self, generation: str = "g1") -> None:
        await self.loader.load("m", generation=generation)

    async def dies(self, generation: str = "g1") -> None:
        """Its process ends while it loads."""
        self.models.error = DeviceLostError("the only end that can be watched from inside")
        with pytest.raises(DeviceLostError):
            await self.load(generation)
        self.models.error = None


@pytest.fixture
async def connections(redis_url: str, key_prefix: str) -> AsyncIterator[RedisConnections]:
    made = RedisConnections(lambda run: connect(redis_url, retries=0, run=run), Keyspace(key_prefix, SHARDS))
    yield made
    await made.close()


@pytest.fixture
def host(connections: RedisConnections) -> Host:
    return Host(connections, Models(), "a")


async def grown_silent(redis: Redis, connections: RedisConnections) -> None:
    """Makes every attempt look as if nobody had spoken for it in a while."""
    key = connections.keys.load_attempts("m", "g1")
    for name, data in (await redis.hgetall(key)).items():
        if name != SUCCESS.encode():
            attempt = msgspec.msgpack.decode(data, type=LoadAttempt)
            old = msgspec.structs.replace(attempt, seen_ms=attempt.seen_ms - SILENT_MS)
            await redis.hset(key, name, msgspec.msgpack.encode(old))


async def test_the_third_process_that_a_load_ends_is_the_last(host: Host, redis: Redis) -> None:
    for _ in range(ROUNDS_MAX):
        await host.dies()

    for _ in range(2):
        with pytest.raises(LoadError, match=GIVEN_UP):
            await host.load()
    assert ROUNDS_MAX == host.models.loads
    assert "ended 3 executors" in host.models.refused["m"]

    # Asked for anew, it is another load.
    await host.load("g2")


async def test_it_is_the_last_in_a_redis_without_memory_too(private_server: EmbeddedRedis) -> None:
    connections = RedisConnections(lambda run: connect(private_server.url, retries=0, run=run), Keyspace("full"))
    commands: Any = connections.commands
    await commands.config_set("maxmemory", 1)
    host = Host(connections, Models(), "a")

    for _ in range(ROUNDS_MAX):
        await host.dies()

    with pytest.raises(LoadError, match=GIVEN_UP):
        await host.load()
    await connections.close()


async def test_a_kill_from_outside_is_forgotten_when_the_load_goes_well(host: Host) -> None:
    for _ in range(ROUNDS_MAX):
        await host.dies()
        await host.load()

    await host.dies()
    await host.dies()
    await host.load()


async def test_a_load_that_fails_has_not_ended_its_process(host: Host) -> None:
    host.models.error = LoadError("no such file")
    for _ in range(ROUNDS_MAX + 1):
        with pytest.raises(LoadError, match="no such file"):
            await host.load()


async def test_executors_that_end_side_by_side_speak_once(connections: RedisConnections, redis: Redis) -> None:
    """A machine that loses its power while five executors load says little about what they loaded."""
    five = [Host(connections, Models(), f"e{number}") for number in range(5)]
    for each in five:
        await each.dies()
    await asyncio.gather(*(each.dies() for each in five))
    await grown_silent(redis, connections)

    # Two rounds, ten ends.
    newcomer = Host(connections, Models(), "another")
    await newcomer.dies()
    with pytest.raises(LoadError, match=r"ended 11 executors"):
        await newcomer.load()


async def test_others_attempts_count_when_nobody_speaks_for_them(connections: RedisConnections, redis: Redis) -> None:
    """Wherever executors get a new name at each start."""
    for number in range(ROUNDS_MAX):
        await Host(connections, Models(), f"pod-{number}").dies()
        await grown_silent(redis, connections)

    with pytest.raises(LoadError, match=GIVEN_UP):
        await Host(connections, Models(), "pod-3").load()


async def test_one_sick_machine_takes_no_model_from_the_others(connections: RedisConnections, redis: Redis) -> None:
    healthy, sick = Host(connections, Models(), "healthy"), Host(connections, Models(), "sick")
    await healthy.load()
    for _ in range(ROUNDS_MAX):
        await sick.dies()
        await grown_silent(redis, connections)

    with pytest.raises(LoadError, match=GIVEN_UP):
        await sick.load()
    await healthy.load()


async def test_a_frozen_executor_takes_its_attempt_back_when_it_thaws(
    connections: RedisConnections, redis: Redis
) -> None:
    frozen, other = Host(connections, Models(gate=threading.Event()), "frozen"), Host(connections, Models(), "other")
    assert frozen.models.gate is not None
    loading = asyncio.create_task(frozen.load())
    while not frozen.models.loads:
        await asyncio.sleep(0.01)
    await grown_silent(redis, connections)
    await other.dies()
    await other.dies()

    frozen.models.gate.set()
    await loading
    await other.load()


@pytest.mark.parametrize(
    ("runs", "machine", "counts"), [(True, "", False), (False, "", True), (False, "another", False)]
)
async def test_two_processes_of_one_name_do_not_count_against_each_other(
    host: Host, connections: RedisConnections, redis: Redis, *, runs: bool, machine: str, counts: bool
) -> None:
    """Nobody should give two the same name; by default it is the machine's. But all replicas of a container may have
    it, and begin at once. Here a process id of another machine means nothing.
    """
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    seconds, _ = await redis.time()
    pid = os.getppid() if runs else ended.pid
    for number in range(1, ROUNDS_MAX + 1):
        attempt = LoadAttempt("a", machine or socket.gethostname(), pid, number, seconds * 1000)
        await redis.hset(connections.keys.load_attempts("m", "g1"), str(number), msgspec.msgpack.encode(attempt))
    await redis.pexpire(connections.keys.load_attempts("m", "g1"), 60_000)

    with pytest.raises(LoadError, match="is given up") if counts else nullcontext():
        await host.load()


async def test_who_is_told_to_stop_may_be_killed_before_its_load_ends(
    host: Host, connections: RedisConnections, redis: Redis
) -> None:
    host.models.gate = threading.Event()
    key = connections.keys.load_attempts("m", "g1")
    loading = asyncio.create_task(host.load())
    while not await redis.hkeys(key):
        await asyncio.sleep(0.01)

    host.stop.request("SIGTERM")

    while await redis.hkeys(key):
        await asyncio.sleep(0.01)
    assert not loading.done()
    host.models.gate.set()
    await loading


async def test_a_load_that_hangs_holds_up_no_other_model_and_is_announced_when_it_ends(host: Host) -> None:
    gate = host.models.gate = threading.Event()
    for _ in range(2):
        with pytest.raises(LoadError, match=r"'m' has been loading for 0 s and goes on.* start executor 'a' anew"):
            await host.loader.load("m", generation="g1", limit_s=0.0)
    while not host.models.loads:
        await asyncio.sleep(0.01)
    host.models.gate = None
    await host.loader.load("other", generation="g2")
    assert not host.changed.is_set()

    gate.set()
    await host.changed.wait()
    assert [] == host.models.unloaded
    await host.load("g3")
    # Of the model that hung, one load at a time.
    assert 3 == host.models.loads


async def test_what_was_unloaded_while_its_load_went_on_is_not_served_when_that_ends(host: Host) -> None:
    host.models.gate = threading.Event()
    with pytest.raises(LoadError, match="goes on"):
        await host.loader.load("m", generation="g1", limit_s=0.0)

    host.loader.unload("m")
    host.models.gate.set()
    await host.changed.wait()

    assert ["m", "m"] == host.models.unloaded


async def test_a_load_that_went_on_and_failed_is_logged(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.models.error = LoadError("no such file")
    with pytest.raises(LoadError, match="goes on"):
        await host.loader.load("m", generation="g1", limit_s=0.0)

    await host.changed.wait()

    assert "model not loaded" in caplog.messages


async def test_what_is_no_attempt_counts_for_nothing(host: Host, connections: RedisConnections, redis: Redis) -> None:
    key = connections.keys.load_attempts("m", "g1")
    await redis.hset(key, b"\xff\xfe", b"\x00garbage")
    await redis.hset(key, "loaded", "when?")
    await host.load()
    assert [b"loaded"] == await redis.hkeys(key)

    await redis.delete(key)
    await redis.set(key, "of another type", px=60_000)
    await host.load()


async def test_a_load_goes_on_over_a_restart_of_redis(private_server: EmbeddedRedis) -> None:
    connections = RedisConnections(
        lambda run: connect(private_server.url, retries=0, run=run), Keyspace("restarted", SHARDS)
    )
    host = Host(connections, Models(), "a")
    await host.dies()
    host.models.gate = threading.Event()
    loading = asyncio.create_task(host.load())
    while host.models.loads < 2:
        await asyncio.sleep(0.01)

    private_server.kill()
    host.models.gate.set()
    await asyncio.to_thread(private_server.start)

    await loading
    async with connections.unbound() as (redis, _):
        assert [b"loaded"] == await redis.hkeys(connections.keys.load_attempts("m", "g1"))
    await connections.close()
