"""A Redis Cluster: which of its nodes holds which keys.

All keys of a mesh have a hash tag (`shared.store.keyspace`), and the keys of one tag lie together on one node. So to
the mesh a Cluster is several servers, one for each tag: the tag's *home*. Each home has connections of its own, and
finds its node as one finds a primary by way of Sentinels. After a failover, or when a tag's slot was moved, the node
refuses the next command; then the home finds its new node. While a slot moves, its home waits.

redis-py's own cluster client reads the whole map of slots at once and keeps it, sends a pipeline's commands node by
node, and repeats by itself what may not be repeated.
"""

from __future__ import annotations

import asyncio
import random
from binascii import crc_hqx
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

from shared.contract.ids import ShardId
from shared.process.addresses import authority
from shared.store.commands import Redis
from shared.store.discovery import Discovery, NoAnswerError, Primary
from shared.store.keyspace import Keyspace
from shared.store.mending import MendingPipeline, MendingRedis, keys_of, text
from shared.store.reading import text_of
from shared.store.redis_py import RepeatablePipeline

T = TypeVar("T")

SLOTS = 1 << 14
MESH_TAG = "mesh"
"""The tag of the keys that belong to no shard. Commands without a key go to its home, too."""
ASKED_MAX = 5
"""Nodes that are asked for the home of a tag, drawn anew each time from the URL's and those that were heard of: if
there are more, those of the URL may all be gone.
"""
NAMELESS = "?"
"""The host of a node that has no name, where nodes tell names (cluster-preferred-endpoint-type hostname)."""
NUMBERS = 4096
"""From so many numbers those of a Cluster's shards are chosen: enough for each node of a large Cluster to have some."""
ADDED_UP = {"DEL", "UNLINK", "EXISTS"}
"""Commands with any number of keys, whose replies are counts."""

Node = tuple[str, int]
"""Its host and port."""


def tag_of(key: str) -> str:
    """The hash tag of a key; MESH_TAG for what has none, and so is no key of a mesh."""
    tag, end, _ = key.partition("{")[2].partition("}")
    return tag if end and tag else MESH_TAG


def slot_of(tag: str) -> int:
    """The slot of the keys with this tag. Source: Redis Cluster's specification, "Keys distribution model": CRC16 in
    its XMODEM variant.
    """
    return crc_hqx(tag.encode(), 0) % SLOTS


class Nodes:
    """The nodes that are known. connect: makes a connection to one of them, not yet connected"""

    def __init__(self, named: Sequence[Node], connect: Callable[[Node], Any]) -> None:
        self._named = tuple(named)
        self._connect = connect
        self._heard_of: tuple[Node, ...] = ()

    def holder(self, tag: str) -> Discovery:
        """Tells the node that holds a tag's keys."""
        return Discovery(
            f"no node of the Redis Cluster tells who holds the keys of {{{tag}}}",
            lambda: map(self._connect, self._asked()),
            ("CLUSTER", "SLOTS"),
            lambda reply, connection: self._holder(slot_of(tag), reply, connection),
        )

    async def with_slots(self) -> tuple[Node, ...]:
        """Those that hold slots. Raises redis-py's ConnectionError if none of those that are asked tells."""
        await self.holder(MESH_TAG).primary()
        return self._heard_of

    def _asked(self) -> tuple[Node, ...]:
        known = tuple(dict.fromkeys(self._named + self._heard_of))
        return known if len(known) <= ASKED_MAX else tuple(random.sample(known, ASKED_MAX))

    def _holder(self, slot: int, reply: Any, connection: Any) -> Primary:
        """The holder by a node's reply to CLUSTER SLOTS. Raises NoAnswerError."""
        try:
            ranges = [(first, last, _node(holder, connection.host)) for first, last, holder, *_ in reply]
            holders = [node for first, last, node in ranges if first <= slot <= last]
        except (AttributeError, IndexError, TypeError, ValueError) as nonsense:
            raise NoAnswerError("its answer is not a Cluster node's") from nonsense
        if not holders:
            raise NoAnswerError(f"it knows of no node with slot {slot}")
        self._heard_of = tuple(dict.fromkeys(node for _, _, node in ranges))
        return Primary(*holders[0], epoch=0)


def _node(told: Sequence[Any], asked: str) -> Node:
    """A node of a reply. asked: the host that was asked: that of a node without a host. One that should tell its name
    but has none is known by its address.
    """
    host, port = text_of(told[0] or b""), int(told[1])
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}")
    if host == NAMELESS:
        host = text_of(told[3][told[3].index(b"ip") + 1])
    return host or asked, port


class ClusterRedis(MendingRedis):
    """A client of all homes: each command goes to the home of its key. As a client by itself it is that of the mesh's.

    open_home  makes the client of a tag's home
    """

    def __init__(self, open_home: Callable[[str], MendingRedis]) -> None:
        self._open = open_home
        self._homes = {MESH_TAG: open_home(MESH_TAG)}
        super().__init__(connection_pool=self._homes[MESH_TAG].connection_pool)

    def know(self, keys: Iterable[str]) -> None:
        """Makes the clients of these keys' homes."""
        for key in keys:
            self.home(key)

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
        await asyncio.gather(*(home.ping() for home in unknown), return_exceptions=True)
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

    async def transaction(self, func: Callable[[Any], Any], *watches: Any, **options: Any) -> Any:
        return await cast("Any", self.home(watches[0])).transaction(func, *watches, **options)

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
    """A pipeline for each home, sent at once. A transaction has one home; one that watches has the mesh's."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - redis-py's signature
        if self.is_watching:
            return await super().execute(raise_on_error)
        client, commands = cast("ClusterRedis", self._client), self.queued()
        tags = tags_of([args for args, _ in commands])
        pipes = {tag: client.at(tag).pipeline(self.is_transaction) for tag in dict.fromkeys(tags)}
        assert not self.is_transaction or len(pipes) < 2, f"a transaction of {', '.join(pipes)}"
        for tag, (args, options) in zip(tags, commands, strict=True):
            cast("Any", pipes[tag]).execute_command(*args, **options)
        await self.reset()
        # Each raises its own errors: where it does, it also mends.
        sent = [pipe.execute(raise_on_error) for pipe in pipes.values()]
        return in_order(tags, dict(zip(pipes, await together(sent), strict=True)))


def _address(home: MendingRedis) -> str | None:
    """Of the node to which the home's newest connection goes, as far as is known."""
    discovery: Discovery = home.connection_pool.connection_kwargs["discovery"]
    return None if discovery.found is None else authority(*discovery.found)


def tags_of(commands: Sequence[Sequence[Any]]) -> list[str]:
    """The tag of each command's keys. A command without any goes with the first that has some."""
    named = [_first_key(command) for command in commands]
    usual = next((tag_of(key) for key in named if key), MESH_TAG)
    return [tag_of(key) if key else usual for key in named]


def _first_key(command: Sequence[Any]) -> str:
    if command[0] == "FCALL":
        return text(command[3]) if command[2] else ""
    return next(iter(keys_of(command)), "")


def in_order(tags: Iterable[str], replies: Mapping[str, Iterable[Any]]) -> list[Any]:
    """The replies of several homes in the order of their commands. tags: of the commands"""
    left = {tag: iter(found) for tag, found in replies.items()}
    return [next(left[tag]) for tag in tags]


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of calls to several homes. Raises the first failure when all have ended."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("list[T]", done)


def servers(redis: Redis, keys: Keyspace) -> list[tuple[Redis, list[ShardId]]]:
    """The shards by the server that holds them, each with the server's client."""
    shards = {keys.base(shard): shard for shard in keys.shards}
    return [(redis.home(group[0]), [shards[base] for base in group]) for group in redis.apart(shards)]


def shards_at(home: str, keys: Keyspace) -> list[ShardId]:
    """The shards whose keys are at this home (`shared.store.server_run`)."""
    return [shard for shard in keys.shards if home in ("", tag_of(keys.base(shard)))]


async def shards_of_cluster(redis: ClusterRedis, count: int = 0) -> tuple[ShardId, ...]:
    """Shards whose keys lie on all nodes, as evenly as can be. count: how many; 0: one for each node with slots"""
    # By their ids: of some nodes no host is told.
    ranges = sorted((last, holder[2]) for _, last, holder, *_ in await redis.execute_command("CLUSTER", "SLOTS"))
    held: dict[Any, deque[ShardId]] = {node: deque() for _, node in ranges}
    for number in range(NUMBERS):
        if node := next((node for last, node in ranges if last >= slot_of(str(number))), None):
            held[node].append(ShardId(number))
    in_turn = (queue.popleft() for _ in range(NUMBERS) for queue in held.values() if queue)
    return tuple(sorted(islice(in_turn, count or len(held))))
