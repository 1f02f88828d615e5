"""Whether the process of a name lives, as the mesh sees it. For health checks, which import no service's code: an
executor's would bring torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from shared.store.agreement import needed_at_start
from shared.store.commands import Redis
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership

MISNAMED = "or it has another name or mesh (--name, --key-prefix)"


async def of_executor(redis: Redis, keys: Keyspace, name: str) -> str:
    """Why no executor of this name is registered, holds its lease and is not leaving; "" if one does, or if it is
    drained, and so not meant to be registered.
    """
    membership = Membership(redis, keys)
    if await membership.is_drained(name):
        return ""
    found = [member for member in await membership.members() if member.registration.name == name]
    if any(member.usable for member in found):
        return ""
    if any(member.registration.leaving for member in found):
        return f"executor '{name}' is leaving the mesh '{keys.prefix}'"
    if found:
        return f"the lease of executor '{name}' has ended: its process is gone, frozen, or cannot reach Redis"
    return (
        f"no executor '{name}' is registered in the mesh '{keys.prefix}': it still loads its models, or has ended, "
        f"{MISNAMED}"
    )


async def of_scheduler(redis: Redis, keys: Keyspace, name: str) -> str:
    """Why no scheduler of this name has renewed its sign of life within its lease; "" if one has."""
    if await redis.exists(keys.scheduler(name)):
        return ""
    return (
        f"no scheduler '{name}' is alive in the mesh '{keys.prefix}': it has ended, is frozen, cannot reach Redis, "
        f"{MISNAMED}"
    )


CHECKED: Mapping[str, Callable[[Redis, Keyspace, str], Awaitable[str]]] = {
    "executor": of_executor,
    "scheduler": of_scheduler,
}


async def problem(service: str, name: str, url: str, prefix: str, *, without_redis: bool = False) -> str:
    """Why the process of that service and name is not healthy, in one line; "" if it is.

    without_redis  whether it counts as healthy while Redis, which alone knows, does not tell, or takes no writes
    """
    redis, keys = connect(url, retries=0), Keyspace(prefix)
    try:
        with needed_at_start(url):
            cause = await CHECKED[service](redis, keys, name)
            if cause and without_redis:
                # A write that changes nothing. Where Redis takes none, no lease can be renewed, or had again.
                await redis.hdel(keys.executors, "")
            return cause
    except UnfitRedisError as error:
        return "" if without_redis else error.message
    finally:
        await redis.aclose()
