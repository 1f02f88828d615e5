"""Where the keys of a mesh live.

Every key has a hash tag (`shared.store.keyspace`), and all keys of one tag are in one place: the tag's *home*. On one
server there is one home for all tags. On a Redis Cluster each tag has a home of its own, on one of the nodes
(`shared.store.connections.cluster`). Each home has connections of its own, so that one that is away holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar, cast

from shared.contract.ids import ShardId
from shared.store.commands import Redis
from shared.store.connections.mending import keys_of, text
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.connections.server_run import AnotherRunError
from shared.store.keyspace import Keyspace

T = TypeVar("T")

MESH_TAG = "mesh"
"""The tag of the keys that belong to no shard. Commands without a key go to its home, too."""


def tag_of(key: str) -> str:
    """The hash tag of a key; MESH_TAG for what has none, and so is no key of a mesh."""
    tag, end, _ = key.partition("{")[2].partition("}")
    return tag if end and tag else MESH_TAG


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


def sound(outcomes: Sequence[T | BaseException]) -> list[T]:
    """The outcomes, if none is an error. Raises the first error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("list[T]", outcomes)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of calls to several homes. Raises the first failure when all have ended."""
    return sound(await asyncio.gather(*calls, return_exceptions=True))


async def without_lost(calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """As `together`, but if a home is lost (its call raises one of CONNECTION_LOST) that exception is its result: what
    the others have done is known. Raises it if all are lost.
    """
    done = await asyncio.gather(*calls, return_exceptions=True)
    failures = [outcome for outcome in done if isinstance(outcome, BaseException)]
    if failures and (len(failures) == len(done) or not all(isinstance(one, CONNECTION_LOST) for one in failures)):
        raise failures[0]
    return done


async def each(tags: Sequence[str], sent: Mapping[str, Awaitable[Iterable[Any]]]) -> list[Any]:
    """The replies of several homes in the order of their commands; those of a lost home as in `without_lost`.

    tags  of the commands
    sent  the call to each home
    """
    found = zip(sent, await without_lost(sent.values()), strict=True)
    return in_order(tags, {tag: repeat(one) if isinstance(one, BaseException) else one for tag, one in found})


def grouped(redis: Redis, things: Iterable[T], key: Callable[[T], str]) -> list[list[T]]:
    """The things by the server that holds their key."""
    by_key = {key(thing): thing for thing in things}
    return [[by_key[one] for one in group] for group in redis.apart(by_key)]


def servers(redis: Redis, keys: Keyspace) -> list[tuple[Redis, list[ShardId]]]:
    """The shards by the server that holds them, each with the server's client."""
    return [(redis.home(keys.base(group[0])), group) for group in grouped(redis, keys.shards, keys.base)]


def shards_at(home: str, keys: Keyspace) -> list[ShardId]:
    """The shards whose keys are at this home (`shared.store.connections.server_run`)."""
    return [shard for shard in keys.shards if home in ("", tag_of(keys.base(shard)))]


async def out_of_reach(redis: Redis, keys: Keyspace) -> Mapping[ShardId, Exception]:
    """The shards whose server does not answer, with what was raised. Raises that if none answers; AnotherRunError if
    one answers that was restarted or replaced.
    """
    asked = servers(redis, keys)
    lost: dict[ShardId, Exception] = {}
    for (_, shards), outcome in zip(asked, await without_lost(server.ping() for server, _ in asked), strict=True):
        if isinstance(outcome, AnotherRunError):
            raise outcome
        if isinstance(outcome, Exception):
            lost |= dict.fromkeys(shards, outcome)
    return lost
