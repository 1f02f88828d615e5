"""An executor's health check says what the mesh believes, and is cheap enough to be asked often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from executor.__main__ import check_health
from executor.health import is_healthy
from executor.settings import ExecutorSettings
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership

NAME = "executor-here"
LEASE_MS = 60_000


def settings_of(redis_url: str, prefix: str) -> ExecutorSettings:
    return ExecutorSettings(name=NAME, redis_url=redis_url, key_prefix=prefix, models=(Path("models"),))


def registration(name: str) -> ExecutorRegistration:
    return ExecutorRegistration(ExecutorId(f"{name}-1"), name, "here", 1, 0)


async def test_an_executor_is_healthy_while_it_holds_its_lease(redis: Redis, redis_url: str, key_prefix: str) -> None:
    settings, keys = settings_of(redis_url, key_prefix), Keyspace(key_prefix)
    membership, ours = Membership(redis, keys), registration(NAME)

    assert not await is_healthy(settings)
    await membership.register(registration("executor-elsewhere"), lease_ms=LEASE_MS)
    assert not await is_healthy(settings)
    await membership.register(ours, lease_ms=LEASE_MS)
    assert await is_healthy(settings)
    await redis.delete(keys.executor_lease(ours.executor))
    assert not await is_healthy(settings)


async def test_an_executor_that_an_operator_has_drained_is_healthy(
    redis: Redis, redis_url: str, key_prefix: str
) -> None:
    """Else an orchestrator would start it again and again, or put another one in its place."""
    membership, settings = Membership(redis, Keyspace(key_prefix)), settings_of(redis_url, key_prefix)

    await membership.drain(NAME, 1)
    assert await is_healthy(settings)
    assert await membership.undrain(NAME)
    assert not await membership.undrain(NAME)

    assert not await is_healthy(settings)


async def test_an_executor_that_leaves_is_not_healthy(redis: Redis, redis_url: str, key_prefix: str) -> None:
    membership, ours = Membership(redis, Keyspace(key_prefix)), registration(NAME)
    await membership.register(ours, lease_ms=LEASE_MS)

    await membership.leave(ours)

    assert not await is_healthy(settings_of(redis_url, key_prefix))


async def test_without_redis_an_executor_is_not_healthy_but_may_be_alive(key_prefix: str) -> None:
    settings = settings_of("redis://127.0.0.1:1", key_prefix)

    assert not await is_healthy(settings)
    assert await is_healthy(settings, without_redis=True)


async def test_an_executor_whose_lease_has_ended_is_not_alive(redis: Redis, redis_url: str, key_prefix: str) -> None:
    assert not await is_healthy(settings_of(redis_url, key_prefix), without_redis=True)


def test_each_word_asks_for_its_check_and_needs_no_more_than_a_name(key_prefix: str) -> None:
    arguments = (f"--name={NAME}", "--redis-url=redis://127.0.0.1:1", f"--key-prefix={key_prefix}")

    assert 1 == check_health("healthcheck", *arguments)
    assert 0 == check_health("livecheck", *arguments)


def test_the_check_does_not_import_torch() -> None:
    program = "import sys, executor.__main__; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    assert 0 == done.returncode
