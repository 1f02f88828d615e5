"""A client of a Redis Cluster: each command goes to the home of its key (`shared.store.connections.homes`).

redis-py's own cluster client reads the whole map of slots at once and keeps it, sends a pipeline's commands node by
node, and repeats by itself what may not be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from shared.contract.ids import ShardId
from shared.process.addresses import authority
from shared.store.connections.cluster import shards_on
from shared.store.connections.discovery import Discovery
from shared.store.connections.homes import MESH_TAG, each, in_order, tag_of, tags_of, together
from shared.store.connections.mending import MendingPipeline, MendingRedis, text
from shared.store.connections.redis_py import RepeatablePipeline

ADDED_UP = {"DEL", "UNLINK", "EXISTS"}
"""Commands with any number of keys, whose replies are counts."""
PATIENCE_S = 5.0
"""How long a process that starts waits for one node of many. A silent one would be given up after 96 s only."""

T = TypeVar("T")


async def within_patience(call: Awaitable[T]) -> T:
    """The result of a call to one node of many. Raises TimeoutError if that takes longer than the others can wait."""
    async with asyncio.timeout(PATIENCE_S):
        return await call


class ClusterRedis(MendingRedis):
    """A client of all homes: each command goes to the home of its key. As a client by itself it is that of the mesh's.

    open_home  makes the client of a tag's home
    """

    def __init__(self, open_home: Callable[[str], MendingRedis]) -> None:
        self._open = open_home
        self._homes = {MESH_TAG: open_home(MESH_TAG)}
        super().__init__(connection_pool=self._homes[MESH_TAG].connection_pool)

    def home(self, key: str) -> MendingRedis:
        return self.at(tag_of(key))

    def at(self, tag: str) -> MendingRedis:
        """The client of a tag's home."""
        if tag not in self._homes:
            self._homes[tag] = self._open(tag)
        return self._homes[tag]

    def homes(self) -> list[MendingRedis]:
        return list(self._homes.values())

    async def servers(self) -> Mapping[str, MendingRedis]:
        """The client of one home for each node that has any, by the node's address. A home whose node nobody names is
        under its tag; what is asked of it raises the reason.
        """
        unknown = [home for home in self.homes() if _address(home) is None]
        await asyncio.gather(*(within_patience(home.ping()) for home in unknown), return_exceptions=True)
        return {_address(home) or f"{{{tag}}}": home for tag, home in self._homes.items()}

    def apart(self, keys: Iterable[str]) -> list[list[str]]:
        apart: dict[str, list[str]] = {}
        for key in keys:
            apart.setdefault(tag_of(key), []).append(key)
        return list(apart.values())

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        keys = [text(key) for key in args[1:]] if args[0] in ADDED_UP or args[0] == "MGET" else []
        if len(groups := self.apart(keys)) < 2:
            return await self.at(*tags_of([args])).execute_command(*args, **options)
        found = await together([self.execute_command(args[0], *group, **options) for group in groups])
        if args[0] in ADDED_UP:
            return sum(found)
        values = {tag_of(group[0]): reply for group, reply in zip(groups, found, strict=True)}
        return in_order(map(tag_of, keys), values)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> RepeatablePipeline:  # noqa: FBT001, FBT002 - redis-py's signature
        return _ClusterPipeline(self, transaction=transaction, shard_hint=shard_hint)

    async def ping(self, **options: Any) -> Any:
        """Reaches every home."""
        return all(await together([home.ping(**options) for home in self.homes()]))

    async def scan_iter(
        self, match: Any = None, count: int | None = None, _type: str | None = None, **options: Any
    ) -> AsyncIterator[Any]:
        """Of each node that has a known home, once; of one home, if the pattern names its tag."""
        named = next((tag for tag in self._homes if f"{{{tag}}}" in (match or "")), None)
        nodes = [self._homes[named]] if named is not None else (await self.servers()).values()
        for node in nodes:
            keys: AsyncIterator[bytes] = cast("Any", node).scan_iter(match, count, _type, **options)
            async for key in keys:
                yield key

    async def aclose(self, *args: Any, **options: Any) -> None:
        for home in self.homes():
            await home.aclose(*args, **options)


class _ClusterPipeline(MendingPipeline):
    """A pipeline for each home, sent at once. A transaction has one home."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - redis-py's signature
        client, commands = cast("ClusterRedis", self._client), self.queued()
        tags = tags_of([args for args, _ in commands])
        pipes = {tag: client.at(tag).pipeline(self.is_transaction) for tag in dict.fromkeys(tags)}
        assert not self.is_transaction or len(pipes) < 2, f"a transaction of {', '.join(pipes)}"
        for tag, (args, options) in zip(tags, commands, strict=True):
            cast("Any", pipes[tag]).execute_command(*args, **options)
        await self.reset()
        # Each raises its own errors: where it does, it also mends.
        sent = {tag: pipe.execute(raise_on_error) for tag, pipe in pipes.items()}
        if not raise_on_error:
            return await each(tags, sent)
        return in_order(tags, dict(zip(sent, await together(sent.values()), strict=True)))


def _address(home: MendingRedis) -> str | None:
    """Of the node to which the home's newest connection goes, as far as is known."""
    discovery: Discovery = home.connection_pool.connection_kwargs["discovery"]
    return None if discovery.found is None else authority(*discovery.found)


async def shards_of_cluster(redis: ClusterRedis, count: int = 0) -> tuple[ShardId, ...]:
    """See `shared.store.connections.cluster.shards_on`. Raises what redis-py raises."""
    return shards_on(await redis.execute_command("CLUSTER", "SLOTS"), count)
