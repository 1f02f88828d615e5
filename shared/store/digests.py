"""Hashes with large values that many services read again and again: who reads fetches only what was written since.

An executor's registration has two lines for each model. Those of 200 executors with 1,000 models each are 40 MB, which
each gateway would read twice a second, and each scheduler ten times. So a value's digest is written with it, in one
step, into a hash of its own. Who reads fetches the digests, and the values whose digest is another one than before.

A digest is a hint. A value whose digest is missing or wrong was written by something that knows of none, and is fetched
every time. And whatever the digests say, each read fetches a few values in turn: so a change of a value alone shows
after a while, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import xxhash

from shared.store.commands import Pipeline, Redis, Value

IN_TURN_MIN = 4
ROUND = 60
"""A read fetches so many values in turn, or this part of all: those of a small mesh with each read."""
FETCHED_AT_ONCE = 32
"""Values that are fetched and decoded without a pause: a large registration takes a millisecond."""

T = TypeVar("T")


class DigestedHash(Generic[T]):
    """key, digests: the two hashes. decode: field and value -> what it means"""

    def __init__(self, redis: Redis, key: str, digests: str, decode: Callable[[bytes, bytes], T]) -> None:
        self._redis = redis
        self._key = key
        self._digests = digests
        self._decode = decode
        self._known: dict[bytes, tuple[bytes, T]] = {}
        """Of each field: the digest of its value, and what it means."""
        self._turn = 0
        self._reading = asyncio.Lock()

    def written(self, name: str, value: bytes) -> tuple[Sequence[Value], Sequence[Value]]:
        """The commands that write a value, to be carried out as one step."""
        return ("HSET", self._key, name, value), ("HSET", self._digests, name, digest_of(value))

    async def different(self, values: Mapping[str, bytes]) -> list[str]:
        """The fields that have another value than these, or none, as far as the digests tell."""
        digests = await self._redis.hmget(self._digests, list(values)) if values else []
        told = zip(values.items(), digests, strict=True)
        return [name for (name, value), digest in told if digest != digest_of(value)]

    def remove(self, pipe: Pipeline, name: str) -> None:
        """Removes a value; the last reply says whether it was there."""
        pipe.hdel(self._digests, name)
        pipe.hdel(self._key, name)

    @property
    def known(self) -> list[T]:
        """The values as they were read last."""
        return [value for _, value in self._known.values()]

    async def one(self, name: str) -> T | None:
        """A value as it is now; None if there is none."""
        data: bytes | None = await self._redis.hget(self._key, name)
        return None if data is None else self._taken(name.encode(), data)

    async def all(self, beside: Callable[[Pipeline], object] = lambda _: None) -> tuple[list[T], list[Any]]:
        """All values, and the replies to what was asked beside. One round trip, or more if values have changed."""
        # One at a time: what an older read brings must not replace what a newer one has brought.
        async with self._reading:
            part = self._in_turn(list(self._known))
            pipe = self._redis.pipeline(transaction=False)
            pipe.hkeys(self._key)
            pipe.hgetall(self._digests)
            pipe.hmget(self._key, part)
            beside(pipe)
            names, digests, values, *replies = await pipe.execute()
            found = await self._found(names, digests, dict(zip(part, values, strict=True)))
            return list(found.values()), replies

    async def some(self, names: Iterable[str]) -> dict[str, T]:
        """Those of these fields that are there, by name."""
        async with self._reading:
            fields = {name.encode(): name for name in names}
            part = self._in_turn(list(fields))
            pipe = self._redis.pipeline(transaction=False)
            pipe.hmget(self._digests, list(fields) or part)
            pipe.hmget(self._key, part)
            digests, values = await pipe.execute()
            # Where a value has gone without its digest, others may have.
            hints = {} if None in values else dict(zip(fields, digests, strict=False))
            found = await self._found(list(fields), hints, dict(zip(part, values, strict=True)))
            return {fields[field]: value for field, value in found.items()}

    def _in_turn(self, names: Sequence[bytes]) -> list[bytes]:
        """The names whose turn it is; if there is none, one that nothing has, because Redis wants one."""
        count = min(len(names), max(IN_TURN_MIN, len(names) // ROUND))
        self._turn += count
        return [names[(self._turn + at) % len(names)] for at in range(count)] or [b""]

    async def _found(
        self, names: Sequence[bytes], digests: Mapping[bytes, bytes | None], fetched: Mapping[bytes, bytes | None]
    ) -> dict[bytes, T]:
        """The values of these fields. fetched: some of them as they are now"""
        there = set(self._take(fetched))
        due = [name for name in names if name not in there and not self._is_as_known(name, digests.get(name))]
        for begin in range(0, len(due), FETCHED_AT_ONCE):
            some = due[begin : begin + FETCHED_AT_ONCE]
            there |= set(self._take(dict(zip(some, await self._redis.hmget(self._key, some), strict=True))))
        gone = set(due) - there
        self._known = {name: self._known[name] for name in names if name not in gone}
        return {name: value for name, (_, value) in self._known.items()}

    def _is_as_known(self, name: bytes, digest: bytes | None) -> bool:
        return name in self._known and self._known[name][0] == digest

    def _take(self, fetched: Mapping[bytes, bytes | None]) -> Iterable[bytes]:
        for name, data in fetched.items():
            if data is not None:
                self._taken(name, data)
                yield name

    def _taken(self, name: bytes, data: bytes) -> T:
        digest = digest_of(data)
        if not self._is_as_known(name, digest):
            self._known[name] = digest, self._decode(name, data)
        return self._known[name][1]


def digest_of(value: bytes) -> bytes:
    return xxhash.xxh64_hexdigest(value).encode()
