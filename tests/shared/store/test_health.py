"""A health check says what the mesh believes and why, and is cheap enough to be asked often."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from executor.settings import ExecutorSettings
from scheduler.settings import SchedulerSettings
from shared.checks import check_health
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration
from shared.settings import CommonSettings
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.health import problem
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from tests.embedded_redis import EmbeddedRedis

NAME = "executor-here"
LEASE_MS = 60_000
NOWHERE = "redis://127.0.0.1:1"


def registration(name: str) -> ExecutorRegistration:
    return ExecutorRegistration(ExecutorId(f"{name}-1"), name, "here", 1, 0)


async def test_an_executor_is_healthy_while_it_holds_its_lease(redis: Redis, redis_url: str, key_prefix: str) -> None:
    membership, ours, keys = Membership(redis, Keyspace(key_prefix)), registration(NAME), Keyspace(key_prefix)
    asked = ("executor", NAME, redis_url, key_prefix)

    assert f"no executor '{NAME}' is registered in the mesh '{key_prefix}'" in await problem(*asked)
    await membership.register(registration("executor-elsewhere"), lease_ms=LEASE_MS)
    assert "is registered" in await problem(*asked)
    await membership.register(ours, lease_ms=LEASE_MS)
    assert not await problem(*asked)
    await redis.delete(keys.executor_lease(ours.executor))
    assert f"the lease of executor '{NAME}' has ended" in await problem(*asked)
    assert await problem(*asked, without_redis=True), "the lease of one that is alive holds"


async def test_an_executor_that_an_operator_has_drained_is_healthy(
    redis: Redis, redis_url: str, key_prefix: str
) -> None:
    """Else an orchestrator would start it again and again, or put another one in its place."""
    membership = Membership(redis, Keyspace(key_prefix))

    await membership.drain(NAME, 1)
    assert not await problem("executor", NAME, redis_url, key_prefix)
    assert await membership.undrain(NAME)
    assert not await membership.undrain(NAME)

    assert await problem("executor", NAME, redis_url, key_prefix)


async def test_an_executor_that_leaves_is_not_healthy(redis: Redis, redis_url: str, key_prefix: str) -> None:
    membership, ours = Membership(redis, Keyspace(key_prefix)), registration(NAME)
    await membership.register(ours, lease_ms=LEASE_MS)

    await membership.leave(ours)

    assert f"executor '{NAME}' is leaving" in await problem("executor", NAME, redis_url, key_prefix)


async def test_a_scheduler_is_healthy_while_its_sign_of_life_lasts(
    redis: Redis, redis_url: str, key_prefix: str
) -> None:
    key = Keyspace(key_prefix).scheduler("s1")

    assert f"no scheduler 's1' is alive in the mesh '{key_prefix}'" in await problem(
        "scheduler", "s1", redis_url, key_prefix
    )
    await redis.set(key, "1", px=LEASE_MS)
    assert not await problem("scheduler", "s1", redis_url, key_prefix)


@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_without_redis_nobody_is_healthy_but_may_be_alive(service: str, key_prefix: str) -> None:
    cause = await problem(service, NAME, NOWHERE, key_prefix)

    assert f"Redis at {NOWHERE} cannot be reached" in cause
    assert not await problem(service, NAME, NOWHERE, key_prefix, without_redis=True)


@pytest.mark.parametrize("service", ["executor", "scheduler"])
async def test_who_cannot_renew_its_lease_because_redis_takes_no_writes_may_be_alive(
    service: str, private_server: EmbeddedRedis
) -> None:
    """Its disk is full, or its replicas are away: to start every executor again would help nobody. A full Redis takes
    leases.
    """
    asked, keys = (service, NAME, private_server.url, "mesh"), Keyspace("mesh")
    async with connect(private_server.url) as redis:
        server: Any = redis
        await Membership(redis, keys).register(registration(NAME), lease_ms=LEASE_MS)
        await redis.delete(keys.executor_lease(registration(NAME).executor))
        await server.config_set("min-replicas-to-write", 1)

        assert await problem(*asked)
        assert not await problem(*asked, without_redis=True)
        await server.config_set("min-replicas-to-write", 0)
        await server.config_set("maxmemory", 1)
        assert await problem(*asked, without_redis=True)


async def test_a_redis_that_refuses_the_check_tells_nothing_of_the_process(redis_url: str, key_prefix: str) -> None:
    refusing = redis_url.replace("://", "://nobody:wrong@")

    assert "refuses the user of SEQMESH_REDIS_URL" in await problem("executor", NAME, refusing, key_prefix)
    assert not await problem("executor", NAME, refusing, key_prefix, without_redis=True)


@pytest.mark.parametrize(("service", "settings"), [("executor", ExecutorSettings), ("scheduler", SchedulerSettings)])
def test_each_word_asks_for_its_check_and_needs_no_more_than_a_name(
    service: str, settings: type[CommonSettings], key_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (f"--name={NAME}", f"--redis-url={NOWHERE}", f"--key-prefix={key_prefix}")

    assert 1 == check_health(service, settings, "healthcheck", *arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"Error: Redis at {NOWHERE} cannot be reached")
    assert 0 == check_health(service, settings, "livecheck", *arguments)
    assert ("", "") == capsys.readouterr()


def test_the_check_does_not_import_torch() -> None:
    program = "import sys, executor.__main__, shared.store.health; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    assert 0 == done.returncode
