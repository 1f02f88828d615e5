"""Guards against loads that end their process (a segmentation fault, no memory, `os._exit`).

Each attempt is noted in Redis before it begins, and the note is removed when the load has ended in Python, well or
badly. A note that stays belongs to a load that ended its process.

    attempt   a process loads a model, and renews its note every few seconds
    ended     an attempt whose note was not renewed for a while, or in whose place another process of its executor's
              name and host is now
    round     one more than the last round of ended attempts. Attempts side by side share a round: if a machine loses
              power while five executors load a model, that counts once against the model, not five times

A load that ended its processes in `ROUNDS_MAX` rounds is given up: it fails, and everything else is served. It is tried
again when it is asked for again (another generation), when the model's files have changed, or when it has not been
tried for `MEMORY_S`. Once the load has succeeded on any executor, only an executor's own attempts count for it, so one
sick machine does not take a model from the others. A process that is told to stop removes its notes at once, because it
may be killed before its loads end; a process that ends because its GPU is lost does not.

A load that takes long goes on beside the loads that come after it: whoever asked for it is told so, and it is
announced when it has ended. So a model that hangs while it is loaded keeps one thread, and no other model from its
load.

Without Redis no load begins. If Redis refuses the note, the load is made uncounted: to serve is worth more than to
count.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from executor.connections import RedisConnections, insist
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel
from executor.workers.devices import DeviceLostError
from executor.workers.engine_thread import EngineThread
from shared.contract.errors import Code, LoadError, MeshError, sendable
from shared.process import logs
from shared.process.lifecycle import Stop, Tasks, end
from shared.process.machine import is_running
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.reading import text_of, value_of
from shared.store.vital import vital

SLOW_S = 30.0
"""How long a load holds up the loads behind it, where models are served already."""
START_S = 300.0
"""How long a load holds up the start of an executor: one that registers without its models makes its mesh ready."""
ROUNDS_MAX = 3
"""Rounds after which a load is given up. One or two kills from outside are no proof against a model."""
SILENT_MS = 30_000
"""An attempt whose note was not renewed for so long counts as ended. Long, because a load may hold the interpreter, or
its process may be frozen for a while; if the process comes back, it removes the note.
"""
SPEAK_S = 10.0
MEMORY_S = 3600
"""How long attempts are remembered after the latest, seconds."""
UNNAMED = "0"
"""The generation of a load at start, which no gateway asked for. Such loads are told apart by the model's files."""
SUCCESS = "loaded"
"""The field beside the attempts that holds the time of the last successful load, ms."""


class LoadAttempt(msgspec.Struct, frozen=True):
    """A load that has begun. seen_ms: when its process last renewed the note, by the clock of Redis"""

    executor: str
    host: str
    pid: int
    round: int
    seen_ms: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """The ended attempts that count against a load, for one executor, by field."""

    attempts: Mapping[bytes, LoadAttempt]

    @property
    def next_round(self) -> int:
        """The round of an attempt that begins now."""
        return 1 + max((attempt.round for attempt in self.attempts.values()), default=0)

    @property
    def is_enough(self) -> bool:
        """Whether the attempts are enough to give the load up."""
        return len({attempt.round for attempt in self.attempts.values()}) >= ROUNDS_MAX


_decoder = msgspec.msgpack.Decoder(LoadAttempt)
_encoder = msgspec.msgpack.Encoder()


class Loader:
    """Loads models for one process.

    executor  its name
    tasks     own the loads that go on beside others
    changed   set when one of these has ended
    """

    def __init__(
        self,
        repository: ModelRepository,
        connections: RedisConnections,
        executor: str,
        stop: Stop,
        tasks: Tasks,
        changed: asyncio.Event,
    ) -> None:
        self._tasks = tasks
        self._changed = changed
        self._late: dict[str, asyncio.Task[LoadedModel]] = {}
        self._unwanted: set[str] = set()
        self._repository = repository
        self._connections = connections
        self._executor = executor
        self._host = socket.gethostname()
        self._stop = stop

    async def load(
        self,
        name: str,
        override_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        generation: str = UNNAMED,
        *,
        limit_s: float | None = SLOW_S,
    ) -> LoadedModel:
        """Loads a model (see `ModelRepository.load`), after an earlier load of it that goes on. Raises LoadError also
        for a load that is given up, and for one that takes longer than the limit and goes on.
        """
        self._unwanted.discard(name)
        earlier = self._late.get(name)
        if earlier is None or await _has_ended(earlier, limit_s):
            loading = asyncio.create_task(self._load(name, override_json, files, generation), name=f"load of {name}")
            try:
                if await _has_ended(loading, limit_s):
                    return await loading
            except asyncio.CancelledError:
                await end((loading,))
                raise
            self._late[name] = loading
            self._tasks.start(self._follow(name, loading), name=f"end of the load of {name}")
        raise LoadError(
            f"'{name}' has been loading for {limit_s:g} s and goes on: it is served when that ends. If it hangs, mend "
            f"it and start executor '{self._executor}' anew, because a thread cannot be stopped",
            Code.UNAVAILABLE,
        )

    def goes_on(self, name: str) -> bool:
        """Whether an earlier load of the model goes on beside the others."""
        return name in self._late

    def unload(self, name: str) -> None:
        """Takes a model out of service (see `ModelRepository.unload`), and also what a load that goes on will bring."""
        self._repository.unload(name)
        if name in self._late:
            self._unwanted.add(name)

    async def _follow(self, name: str, late: asyncio.Task[LoadedModel]) -> None:
        """Has it announced how a load that went on has ended."""
        try:
            await late
        except MeshError as error:
            logs.error("model not loaded", model=name, cause=error.message)
        finally:
            del self._late[name]
        if name in self._unwanted:
            self._unwanted.discard(name)
            self._repository.unload(name)
        self._changed.set()

    async def _load(
        self, name: str, override_json: str | None, files: Mapping[str, bytes] | None, generation: str
    ) -> LoadedModel:
        load = generation if generation != UNNAMED else await asyncio.to_thread(self._files_of, name)
        key = self._connections.keys.load_attempts(sendable(name), load)
        field = secrets.token_bytes(8)
        # None: Redis refused the note, and the load is made uncounted.
        evidence = await self._noted(lambda redis: self._begin(redis, key, field)) or Evidence({})
        if evidence.is_enough:
            raise self._given_up(name, len(evidence.attempts))
        speaking = asyncio.create_task(self._speak_for(key, field, evidence.next_round), name=f"load of {name}")
        try:
            # A thread of its own: loads that hang must not use up the event loop's threads.
            thread = EngineThread(f"load of {name}")
            loading = thread.start(self._repository.load, name, override_json, files, generation)
            thread.stop()
            loaded = await loading
        except DeviceLostError:
            # The process ends, as by a segmentation fault: the attempt stays.
            await end((speaking,))
            raise
        except BaseException:
            await end((speaking,))
            await self._noted(lambda redis: redis.hdel(key, field))
            raise
        await end((speaking,))
        await self._noted(lambda redis: self._went_well(redis, key, [field, *evidence.attempts]))
        return loaded

    def _files_of(self, name: str) -> str:
        try:
            return self._repository.fingerprint(name) or UNNAMED
        except OSError:
            # The load itself will report what cannot be read.
            return UNNAMED

    def _given_up(self, name: str, ended: int) -> LoadError:
        reason = (
            f"load of model '{name}' ended {ended} executors and is given up: load it anew when it is mended, or "
            f"change its files; an executor that starts {MEMORY_S // 60} minutes after the last attempt tries it again"
        )
        self._repository.refuse(name, reason)
        return LoadError(f"failed to load '{name}', {reason}", Code.INVALID_ARG)

    # -- what Redis holds -------------------------------------------------------------------------------------------

    async def _noted(self, write: Callable[[Redis], Awaitable[Any]]) -> Any:
        """Reads or writes notes; None where Redis refuses. Uses a connection of its own: a load goes on over a restart
        of Redis, when the executor's other connections do not open yet.
        """

        async def once() -> Any:
            async with self._connections.unbound() as (redis, _):
                try:
                    return await write(redis)
                except ResponseError as refused:
                    logs.warning("load not counted", executor=self._executor, cause=str(refused))
                    return None

        return await insist("note of a load", once)

    async def _begin(self, redis: Redis, key: str, field: bytes) -> Evidence:
        """Notes an attempt, unless the load is given up. Returns what counts against the load."""
        now_ms = await redis_now_ms(redis)
        notes: dict[bytes, bytes] = await redis.hgetall(key)
        proven = is_recent(notes.pop(SUCCESS.encode(), b""), now_ms)
        attempts = {name: value_of(key, data, _decoder.decode, field=text_of(name)) for name, data in notes.items()}
        recent = {name: one for name, one in attempts.items() if one and now_ms - one.seen_ms < MEMORY_S * 1000}
        if outdated := attempts.keys() - recent.keys():
            await redis.hdel(key, *outdated)
        evidence = self.against(recent, now_ms, is_proven=proven)
        if not evidence.is_enough:
            await self._write(redis, key, field, evidence.next_round)
        return evidence

    def against(self, attempts: Mapping[bytes, LoadAttempt], now_ms: int, *, is_proven: bool) -> Evidence:
        """The attempts that have ended and count for this executor.
        is_proven: the load has succeeded on some executor
        """
        ended = {
            field: attempt
            for field, attempt in attempts.items()
            if now_ms - attempt.seen_ms >= SILENT_MS or self._succeeds(attempt)
        }
        return Evidence({field: one for field, one in ended.items() if one.executor == self._executor or not is_proven})

    def _succeeds(self, attempt: LoadAttempt) -> bool:
        """Whether this process has taken the place of the attempt's process: it has the same name and host, and the
        other runs no more. Of a process on another host only its silence tells.
        """
        is_own = attempt.executor == self._executor and attempt.host == self._host
        return is_own and (attempt.pid == os.getpid() or not may_run(attempt.pid))

    async def _speak_for(self, key: str, field: bytes, number: int) -> None:
        """Renews the note of an attempt until this process is told to stop; then removes the note."""
        while not self._stop.requested:
            with suppress(TimeoutError):
                async with asyncio.timeout(SPEAK_S):
                    await self._stop.wait()
                    break
            await self._noted(lambda redis: self._write(redis, key, field, number))
        await self._noted(lambda redis: redis.hdel(key, field))

    async def _write(self, redis: Redis, key: str, field: bytes, number: int) -> None:
        attempt = LoadAttempt(self._executor, self._host, os.getpid(), number, await redis_now_ms(redis))
        await redis.eval(*vital(("HSET", key, field, _encoder.encode(attempt)), ("EXPIRE", key, MEMORY_S)))

    async def _went_well(self, redis: Redis, key: str, fields: list[bytes]) -> None:
        now_ms = await redis_now_ms(redis)
        noted = (("HDEL", key, *fields), ("HSET", key, SUCCESS, now_ms), ("EXPIRE", key, MEMORY_S))
        await redis.eval(*vital(*noted))


async def _has_ended(task: asyncio.Task[Any], limit_s: float | None) -> bool:
    ended, _ = await asyncio.wait([task], timeout=limit_s)
    return bool(ended)


def is_recent(when: bytes, now_ms: int) -> bool:
    """Whether a noted time is not older than `MEMORY_S`."""
    return when.isdigit() and now_ms - int(when) < MEMORY_S * 1000


def may_run(pid: int) -> bool:
    """Whether this machine has such a process, or may have: an impossible id proves nothing."""
    try:
        return is_running(pid)
    except OverflowError:
        return True
