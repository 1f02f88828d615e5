"""Load and unload on request: every executor in explicit mode carries out each control message, once.

The registration tells what became of a message: `applied` and `beyond` say which messages were carried out, `failures`
which ones could not be. The gateway that asked reads it there.

Commands belong to the mesh, not to a process. Redis holds two commands on each model: the last that was asked
(`wanted`) and the last that an executor carried out (`kept`). An executor that starts begins with the kept one, and
then tries the wanted one, as all others did. So:
* A model that was loaded on request outlives the executors that loaded it.
* A model that was unloaded does not come back with the next crash.
* Where a reload failed, every executor serves the model before it.
The stream only says that there is a new command about a model. Commands can be repeated without harm, because a load
that changes nothing does nothing.

The commands about one model are carried out in order. An unload waits for no other model, and a load only for the load
before it, and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

import msgspec

from executor.connections import RETRY_DELAY_S, RedisConnections, insist
from executor.lease.registration import Applied
from executor.models.loader import SLOW_S, START_S, Loader
from executor.models.repository import ModelRepository, NoSuchModelError
from executor.sequences.inbox import BEGINNING
from shared.contract.errors import Code, MeshError
from shared.contract.ids import entry_key
from shared.contract.messages import ControlMessage, LoadFailure, encode
from shared.process import logs
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.reading import noted, text_of, value_of

BLOCK_MS = 1000
ASKED_S = 240.0
"""How long a load on request is waited for: less than the 300 s for which the gateway that asked waits."""
OPEN_MAX = 64
"""Most commands that are under way or wait for others, and that were carried out behind one that is under way."""
FAILURES_MAX = 32
"""Failures that a registration tells: the gateway that asked looks ten times a second."""

_decoder = msgspec.msgpack.Decoder(ControlMessage)


class Control:
    """Reads the control stream. changed: set when there is something to announce to the mesh"""

    def __init__(
        self, connections: RedisConnections, repository: ModelRepository, loader: Loader, changed: asyncio.Event
    ) -> None:
        self._redis = connections.commands
        self._blocking = connections.blocking
        self._keys = connections.keys
        self._repository = repository
        self._loader = loader
        self._changed = changed
        self._missed = False
        self._position = BEGINNING
        self._open: dict[str, asyncio.Task[None]] = {}
        self._of_model: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Redis is asked about one command at a time, so that loads take their turns in the order of their entries.
        self._asking = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._latest_load: asyncio.Task[object] | None = None
        self.applied = Applied()

    async def commanded(self) -> set[str]:
        """Models about which there is a command. Raises one of `CONNECTION_LOST`."""
        names: list[bytes] = await self._redis.hkeys(self._keys.kept) + await self._redis.hkeys(self._keys.wanted)
        return {text_of(name) for name in names}

    async def catch_up(self) -> None:
        """Carries out the commands given before this executor started. Failures are announced: the gateway that gave
        the command may still wait, if the executors that read it first have died. Raises one of `CONNECTION_LOST`.
        """
        # The position is read first: a command that comes meanwhile is then read again from the stream.
        last = await self._redis.xrevrange(self._keys.control, count=1)
        position = last[0][0].decode() if last else BEGINNING
        failures = list(self.applied.failures)
        for model in sorted(await self.commanded()):
            kept: bytes | None = await self._redis.hget(self._keys.kept, model)
            wanted: bytes | None = await self._redis.hget(self._keys.wanted, model)
            for key, command in ((self._keys.kept, kept), (self._keys.wanted, wanted if wanted != kept else None)):
                if command is not None:
                    # A task of its own, for whose end the next load waits.
                    failed = await asyncio.create_task(self._carry_out(model, key, command, ""), name=f"{model} wanted")
                    failures += [failed] if failed is not None else []
        self._position = position
        self.applied = Applied(position, tuple(failures[-FAILURES_MAX:]))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as commands:
            while True:
                try:
                    if self._missed:
                        await self._fewer_than(1)
                        await self.catch_up()
                        self._missed = False
                        self._changed.set()
                    for entry, fields in await self._entries():
                        await self._fewer_than(max(1, OPEN_MAX - len(self.applied.beyond)))
                        self._position = entry
                        self._open[entry] = commands.create_task(self._hear(entry, fields), name=f"command {entry}")
                except LOST_OR_REFUSED as error:
                    self._delayed(error)
                    await asyncio.sleep(RETRY_DELAY_S)

    def _delayed(self, error: Exception) -> None:
        # The stream may be trimmed, or empty, when Redis is back. The commands themselves are in the hashes.
        self._missed = True
        logs.warning("control reading delayed", cause=str(error))

    async def _fewer_than(self, count: int) -> None:
        """Returns when fewer commands are under way."""
        while len(self._open) >= count:
            await asyncio.wait(self._open.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _entries(self) -> list[tuple[str, Mapping[bytes, bytes]]]:
        """The next entries; none if none comes within `BLOCK_MS`."""
        read = await self._blocking.xread({self._keys.control: self._position}, block=BLOCK_MS)
        return [(entry.decode(), fields) for _, entries in read or () for entry, fields in entries]

    async def _hear(self, entry: str, fields: Mapping[bytes, bytes]) -> None:
        if b"n" not in fields:
            noted(self._keys.control, "no model is named", field=entry)
        model, failure = text_of(fields.get(b"n", b"")), None
        # The lock is held by those who wait for it, and gone with the last of them.
        lock = self._of_model.setdefault(model, asyncio.Lock())
        try:
            async with lock:
                # The stream only names the model. The latest command about it counts, even if this entry was of an
                # earlier one.
                async with self._asking:
                    command: bytes | None = await self._redis.hget(self._keys.wanted, model)
                if command is not None:
                    failure = await self._carry_out(model, self._keys.wanted, command, entry)
        except LOST_OR_REFUSED as error:
            self._delayed(error)
        del self._open[entry]
        if not self._missed:
            self._conclude(entry, failure)

    def _conclude(self, entry: str, failure: LoadFailure | None) -> None:
        """The command of an entry was carried out, or failed."""
        done = sorted({self.applied.position, *self.applied.beyond, entry}, key=entry_key)
        first = min(map(entry_key, self._open), default=None)
        before = [one for one in done if first is None or entry_key(one) < first]
        failures = (*self.applied.failures, failure) if failure is not None else self.applied.failures
        self.applied = Applied(before[-1], failures[-FAILURES_MAX:], tuple(done[len(before) :]))
        self._changed.set()

    def _read(self, model: str, key: str, command: bytes) -> ControlMessage | None:
        """A command as a hash holds it under the model's name; None if it cannot be read. key: the hash"""
        message: ControlMessage | None = value_of(key, command, _decoder.decode, field=model)
        return message if message is not None and message.model == model else None

    async def _carry_out(self, model: str, key: str, command: bytes, entry: str) -> LoadFailure | None:
        """Carries out a command; if that succeeds, keeps it for executors that start later.
        key: the hash that holds it
        """
        message = self._read(model, key, command)
        if message is None:
            return LoadFailure(entry, model, Code.INTERNAL, f"what was asked of '{model}' cannot be read: ask again")
        try:
            done = await self._do(message, ASKED_S if key == self._keys.wanted else START_S)
        except MeshError as error:
            logs.error("model not loaded", model=message.model, cause=error.message)
            found = not isinstance(error, NoSuchModelError)
            return LoadFailure(entry, message.model, error.code, error.message, found, message.generation)
        if key == self._keys.wanted:
            await insist("keeping a load", lambda: self._redis.hset(self._keys.kept, model, encode(done)))
        return None

    async def _do(self, message: ControlMessage, limit_s: float) -> ControlMessage:
        """Loads, within the limit, or unloads. Returns the command by which an executor that starts later gets the same
        result.
        """
        if message.action not in ("load", "unload"):
            raise MeshError(f"this executor cannot '{message.action}' a model: upgrade it", Code.UNSUPPORTED)
        if message.action == "unload":
            self._loader.unload(message.model)
            self._repository.never_loaded(message.model)
            return message
        await self._load_before()
        self._repository.note_load(message.model)
        self._changed.set()
        loaded = await self._loader.load(
            message.model, message.config_json, message.files, message.generation, limit_s=limit_s
        )
        # A load that changed nothing keeps the generation of the load before.
        return msgspec.structs.replace(message, generation=loaded.record.generation)

    async def _load_before(self) -> None:
        """Returns when the load before this one has ended, or has taken long."""
        async with self._turn:
            before, self._latest_load = self._latest_load, asyncio.current_task()
            if before is not None:
                await asyncio.wait({before}, timeout=SLOW_S)
