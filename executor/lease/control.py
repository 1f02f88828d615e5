"""Load and unload on request: every executor in explicit mode carries out each control message, once, in order.

The registration tells what became of a message: `applied` says how far messages were carried out, `failures` which ones
could not be. The gateway that asked reads it there.

Commands belong to the mesh, not to a process. Redis holds two commands on each model: the last that was asked
(`wanted`) and the last that an executor carried out (`kept`). An executor that starts begins with the kept one, and
then tries the wanted one, as all others did. So:
* A model that was loaded on request outlives the executors that loaded it.
* A model that was unloaded does not come back with the next crash.
* Where a reload failed, every executor serves the model before it.
The stream only says that there is a new command about a model. Commands can be repeated without harm, because a load
that changes nothing does nothing. So a model is unloaded while the load of another one, asked for before, takes long;
when the unload has its turn, and counts as carried out, it changes nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from executor.connections import RETRY_DELAY_S, RedisConnections, insist
from executor.lease.registration import Applied
from executor.models.loader import START_S, Loader
from executor.models.repository import ModelRepository, NoSuchModelError
from executor.sequences.inbox import BEGINNING
from shared.contract.errors import Code, MeshError
from shared.contract.messages import ControlMessage, LoadFailure, encode
from shared.process import logs
from shared.process.lifecycle import end
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.reading import noted, text_of, value_of

BLOCK_MS = 1000
ASKED_S = 240.0
"""How long a load on request holds up the next command: less than the 300 s for which the gateway that asked waits."""
LONG_S = 1.0
"""A load that takes longer holds up no unload of another model."""
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
        for model in sorted(await self.commanded()):
            kept: bytes | None = await self._redis.hget(self._keys.kept, model)
            wanted: bytes | None = await self._redis.hget(self._keys.wanted, model)
            for key, command in ((self._keys.kept, kept), (self._keys.wanted, wanted if wanted != kept else None)):
                if command is not None:
                    self._tell(await self._carry_out(model, key, command, ""))
        self.applied = Applied(position, self.applied.failures)

    async def run(self) -> None:
        while True:
            try:
                if self._missed:
                    await self.catch_up()
                    self._missed = False
                    self._changed.set()
                for entry, fields in await self._entries(self.applied.position):
                    await self._hear(entry, fields)
            except LOST_OR_REFUSED as error:
                # The stream may be trimmed, or empty, when Redis is back. The commands themselves are in the hashes.
                self._missed = True
                logs.warning("control reading delayed", cause=str(error))
                await asyncio.sleep(RETRY_DELAY_S)

    async def _entries(self, position: str) -> list[tuple[str, Mapping[bytes, bytes]]]:
        """The entries behind a position; none if none comes within `BLOCK_MS`."""
        read = await self._blocking.xread({self._keys.control: position}, block=BLOCK_MS)
        return [(entry.decode(), fields) for _, entries in read or () for entry, fields in entries]

    async def _hear(self, entry: str, fields: Mapping[bytes, bytes]) -> None:
        if b"n" not in fields:
            noted(self._keys.control, "no model is named", field=entry)
        model = text_of(fields.get(b"n", b""))
        # The stream only names the model. The latest command about it counts, even if this entry was of an earlier one.
        command: bytes | None = await self._redis.hget(self._keys.wanted, model)
        if command is not None:
            unloading = asyncio.create_task(self._unload_meanwhile(model, entry), name="unloads")
            try:
                self._tell(await self._carry_out(model, self._keys.wanted, command, entry))
            finally:
                await end((unloading,))
        self.applied = Applied(entry, self.applied.failures)
        self._changed.set()

    async def _unload_meanwhile(self, loading: str, position: str) -> None:
        """Unloads what is unloaded by entries behind this one, while a load takes long."""
        await asyncio.sleep(LONG_S)
        with suppress(*LOST_OR_REFUSED):
            while True:
                for entry, fields in await self._entries(position):
                    position, model = entry, text_of(fields.get(b"n", b""))
                    command: bytes | None = await self._redis.hget(self._keys.wanted, model)
                    if command is None or model == loading:
                        continue
                    message = self._read(model, self._keys.wanted, command)
                    if message is not None and message.action == "unload":
                        self._unload(model)
                        self._changed.set()

    def _unload(self, model: str) -> None:
        self._loader.unload(model)
        self._repository.never_loaded(model)

    def _tell(self, failure: LoadFailure | None) -> None:
        if failure is not None:
            self.applied = Applied(self.applied.position, (*self.applied.failures, failure)[-FAILURES_MAX:])

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
            await insist("keeping a load", lambda: self._keep(done))
        return None

    async def _do(self, message: ControlMessage, limit_s: float) -> ControlMessage:
        """Loads, within the limit, or unloads. Returns the command by which an executor that starts later gets the same
        result.
        """
        if message.action not in ("load", "unload"):
            raise MeshError(f"this executor cannot '{message.action}' a model: upgrade it", Code.UNSUPPORTED)
        if message.action == "unload":
            self._unload(message.model)
            return message
        self._repository.note_load(message.model)
        self._changed.set()
        loaded = await self._loader.load(
            message.model, message.config_json, message.files, message.generation, limit_s=limit_s
        )
        # A load that changed nothing keeps the generation of the load before.
        return msgspec.structs.replace(message, generation=loaded.record.generation)

    async def _keep(self, message: ControlMessage) -> None:
        await self._redis.hset(self._keys.kept, message.model, encode(message))
