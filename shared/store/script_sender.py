"""Calls of scripts on their way to Redis, and their replies on the way back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from redis.exceptions import ResponseError

from shared.statistics.meter import RoundTripMeter
from shared.store.commands import Redis
from shared.store.connections.homes import sound, without_lost
from shared.store.connections.link import Link
from shared.store.libraries import NAMES, library
from shared.store.reading import text_of

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One call of a script, ready to be sent: alone, or with others in one round trip (`ScriptSender.run_all`)."""

    script: str
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], T]


class ScriptSender:
    """Sends calls of scripts over one connection (pool).

    Some calls must not be repeated unknowingly (`submit` without a request id). They belong on a connection without
    retries: `connect(url, retries=0)`.
    """

    def __init__(self, redis: Redis, prefix: str, trips: RoundTripMeter | None) -> None:
        """prefix: of the mesh. trips: measures the round trips; None: nobody does"""
        self._redis = redis
        self._trips = trips
        self.library = library(prefix, redis.database)
        self._functions = {name: self.library.function(name) for name in NAMES}

    async def run(self, call: Call[T]) -> T:
        (outcome,) = await self.run_together([call])
        return outcome

    async def run_together(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T]:
        """As `run_all`, but raises the first error among the outcomes."""
        return sound(await self.run_all(calls, link))

    async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """Sends calls in one round trip; Redis runs them in this order. An error is the result of its own call alone.

        If the server does not have the library, it is loaded, and the calls that were not known are made after the
        others. So calls whose order matters belong together in one script call. A server that refuses the library (it
        is full, or the user may not) refuses these calls with the same error.

        link    a connected link to send them on, instead of a connection of the pool
        Raises redis.ConnectionError when the connection is lost: then it is not known which calls were run. Where calls
        go to several homes of a Cluster, that is the result of the calls to a lost one.
        """
        sent_ns = time.perf_counter_ns()
        functions = self._functions
        commands = [("FCALL", functions[call.script], len(call.keys), *call.keys, *call.args) for call in calls]
        outcomes = await self._exchanged(commands, link)
        if self._trips is not None and calls:
            self._trips.took(calls[0].script, time.perf_counter_ns() - sent_ns)
        unknown = [index for index, outcome in enumerate(outcomes) if is_unknown(outcome)]
        if unknown:
            # The data is new, or a scheduler of another release has removed the library. None of these calls was run.
            refusals = await self._load(link)
            commands = [commands[index] for index in unknown]
            again = await self._exchanged(commands, link)
            for index, outcome in zip(unknown, again, strict=True):
                outcomes[index] = refusals[0] if refusals and is_unknown(outcome) else outcome
        return [
            outcome if isinstance(outcome, Exception) else call.read(outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    async def forget_others(self) -> int:
        """Removes the mesh's libraries of other releases; returns how many. A process of such a release that is still
        there loads its own again.

        They stay on a server that does not take this release's: it is full, and would not take theirs again either.
        """
        removed = 0
        for server in self._redis.homes():
            listed = await server.function_list(f"{self.library.of_mesh}*")
            names = [text_of(found[found.index(b"library_name") + 1]) for found in listed]
            if self.library.name not in names and await self._refused(server):
                continue
            others = [name for name in names if name != self.library.name]
            # Whoever comes at the same time may have removed one of them.
            replies = await _piped(server, [("FUNCTION", "DELETE", name) for name in others])
            removed += sum(not isinstance(reply, Exception) for reply in replies)
        return removed

    async def _load(self, link: Link | None) -> list[ResponseError]:
        """Returns what servers refuse the library with."""
        parts = self._redis.homes() if link is None else link.parts()
        # Of several homes one may be away. The calls for it say so.
        told = await without_lost(self._refused(part) for part in parts)
        return [refusal for refusals in told if not isinstance(refusals, BaseException) for refusal in refusals]

    async def _refused(self, home: Redis | Link) -> list[ResponseError]:
        """Loads the library. Returns the error if it is refused, in a list: `without_lost` takes one alone for a lost
        home. Raises one of `redis_py.CONNECTION_LOST`.
        """
        # REPLACE: another process may have loaded the same library meanwhile.
        command = ("FUNCTION", "LOAD", "REPLACE", self.library.text)
        try:
            if isinstance(home, Link):
                await home.connect()
                await home.ask([command])
            else:
                sound(await _piped(home, [command]))
        except ResponseError as refusal:
            return [refusal]
        return []

    def _exchanged(self, commands: Sequence[Sequence[Any]], link: Link | None) -> Awaitable[list[Any]]:
        """One round trip, over the link if there is one. An error reply is an exception in its place."""
        return link.exchange(commands) if link is not None else _piped(self._redis, commands)


async def _piped(redis: Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """One round trip on a connection of the pool. An error reply is an exception in its place."""
    pipe = redis.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    return await pipe.execute(raise_on_error=False)


def is_unknown(outcome: object) -> bool:
    """Whether a reply says that the server does not have the script, and so did not run it."""
    return isinstance(outcome, ResponseError) and "Function not found" in str(outcome)


def each_as(kind: Callable[[int], T]) -> Callable[[list[int]], list[T]]:
    """Reads a reply with one number for each sequence, step or request."""
    return lambda numbers: [kind(number) for number in numbers]
