"""Whether an executor lives, as the mesh sees it: by its lease. For health checks, which must not import torch."""

from __future__ import annotations

from executor.settings import ExecutorSettings
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.redis_client import connect
from shared.store.redis_py import CONNECTION_LOST


async def is_healthy(settings: ExecutorSettings, *, without_redis: bool = False) -> bool:
    """Whether an executor of this name is registered, holds its lease and is not leaving; or is drained, and so not
    meant to be registered. `without_redis` is the answer while Redis, which alone knows, does not answer.
    """
    redis = connect(settings.redis_url, retries=0)
    try:
        membership = Membership(redis, Keyspace(settings.key_prefix))
        name = settings.name_of("executor")
        if await membership.is_drained(name):
            return True
        members = await membership.members()
        return any(member.usable and member.registration.name == name for member in members)
    except CONNECTION_LOST:
        return without_redis
    finally:
        await redis.aclose()
