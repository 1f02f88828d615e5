"""Removes keys whose type does not match their name, as soon as a command meets them; they are then treated as empty.

Redis does not carry out a command that it refuses with WRONGTYPE. So the sender finds out which of the command's keys
are wrong, removes them (`shared.store.reading` counts and logs them), and sends the command again. The content of such
a key is lost, as if it had been removed: readers cope with missing keys anyway. Scripts do the same inside
(common.lua), without undoing or repeating what they did before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.store.connections.redis_py import RepeatablePipeline
from shared.store.keyspace import TYPES, kind_of
from shared.store.reading import noted, text_of

Ask = Callable[[Sequence[Sequence[Any]]], Awaitable[Sequence[Any]]]
"""Sends commands in one round trip; returns their replies."""


def is_wrong_type(reply: object) -> bool:
    """Whether a reply says that a key has another type than its command needs."""
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def keys_of(command: Sequence[Any]) -> list[str]:
    """The keys that a command names. Of those that the mesh sends, XREAD and BLPOP have several of one type; others
    with several take any type, and the first is enough. Scripts mend their own keys.
    """
    words = [text(word) for word in command]
    if words[0] in ("FCALL", "FUNCTION"):
        return []
    if words[0] == "EVAL":
        return words[3 : 3 + int(words[2])]
    if words[0] == "XREAD":
        streams = words[words.index("STREAMS") + 1 :]
        return streams[: len(streams) // 2]
    if words[0] == "BLPOP":
        return words[1:-1]
    return words[1:2]


async def mend(ask: Ask, commands: Iterable[Sequence[Any]]) -> None:
    """Removes the commands' keys that have another type than their kind. Raises what `ask` raises.

    A key whose type the server does not tell stays: it may be a sound one that stands beside the wrong one.
    """
    names = dict.fromkeys(name for command in commands for name in keys_of(command))
    asked = [name for name in names if kind_of(name) in TYPES]
    wrong: list[str] = []
    for name, reply in zip(asked, await ask([("TYPE", name) for name in asked]), strict=True):
        found, meant = text(reply), TYPES[kind_of(name)]
        if found not in ("none", meant) and not isinstance(reply, Exception):
            noted(name, f"it is a {found}, not a {meant}")
            wrong.append(name)
    if wrong:
        await ask([("UNLINK", *wrong)])


def text(word: Any) -> str:
    """A word of a command, decoded."""
    return text_of(word) if isinstance(word, bytes) else str(word)


class MendingRedis(Redis):
    """A client that removes keys of a wrong type when a command meets them."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        # redis-py leaves the result's type open.
        execute = cast("Any", super().execute_command)
        try:
            return await execute(*args, **options)
        except ResponseError as refused:
            if not is_wrong_type(refused):
                raise
        await mend(self.ask, [args])
        return await execute(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> RepeatablePipeline:  # noqa: FBT001, FBT002 - redis-py's signature
        return MendingPipeline(self, transaction=transaction, shard_hint=shard_hint)

    @property
    def database(self) -> int:
        """Its number on the server."""
        return self.connection_pool.connection_kwargs.get("db", 0)

    def home(self, key: str) -> MendingRedis:
        """The client of the server that holds this key."""
        return self

    def know(self, keys: Iterable[str]) -> None:
        """Makes the clients of these keys' homes: what is asked of all servers is asked of those that are known."""
        for key in keys:
            self.home(key)

    def at(self, tag: str) -> MendingRedis:
        """The client of a home (of a Cluster: `shared.store.connections.cluster_redis`)."""
        return self

    def homes(self) -> list[MendingRedis]:
        """The client of each server (of a Cluster: `shared.store.connections.cluster_redis`)."""
        return [self]

    async def servers(self) -> Mapping[str, MendingRedis]:
        """A client of each server by its address; "" for the only one."""
        return {"": self}

    def apart(self, keys: Iterable[str]) -> list[list[str]]:
        """The keys by the server that holds them."""
        return [list(keys)]

    async def ask(self, commands: Sequence[Sequence[Any]]) -> Sequence[Any]:
        pipe = cast("Any", super().pipeline(transaction=False))
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute()


class MendingPipeline(RepeatablePipeline):
    """Sends the whole pipeline again after mending: no command that the mesh sends in this way does harm if it is
    repeated."""

    def __init__(self, client: MendingRedis, *, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client, transaction=transaction, shard_hint=shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - redis-py's signature
        commands = self.queued()
        try:
            return await super().execute(raise_on_error)
        except ResponseError as refused:
            if not is_wrong_type(refused):
                raise
        await mend(self._client.ask, [args for args, _ in commands])
        self.queue(commands)
        return await super().execute(raise_on_error)
