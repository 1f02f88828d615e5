"""Load and unload on request: every executor in explicit mode carries out each control message, once, in order.

A message's outcome stands in the registration: `applied` tells that it was carried out, the repository index what came
of it. Whoever asked reads it there.

What was asked is the mesh's, not a process's: an executor that starts, anew or for the first time, begins with the last
word on every model, so that a model that was loaded on request outlives the executors that loaded it, and one that was
unloaded does not come back with the next crash.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import msgspec

from executor.incarnation import Connections
from executor.repository import Repository
from shared import logs
from shared.errors import MeshError
from shared.messages import ControlMessage
from shared.redis_client import CONNECTION_LOST

BLOCK_MS = 1000
RETRY_DELAY_S = 0.5
MESSAGES_PER_READ = 16
"""A message may carry a model's files."""

_decoder = msgspec.msgpack.Decoder(ControlMessage)


class Control:
    """Reads the control stream. position: the last message carried out, or made void by a later one."""

    def __init__(self, connections: Connections, repository: Repository) -> None:
        self._connections = connections
        self._repository = repository
        self.position = "0-0"
        self.changed = asyncio.Event()
        """Set when the models have changed: the incarnation has to announce them."""

    async def catch_up(self) -> None:
        """Carries out what was asked before this process began: of each model's messages, the last."""
        commands = cast(Any, self._connections.commands)
        last: dict[str, ControlMessage] = {}
        while entries := await commands.xrange(
            self._connections.keys.control, min=f"({self.position}", count=MESSAGES_PER_READ
        ):
            for entry, fields in entries:
                message = _decoder.decode(fields[b"m"])
                # Removed first: the models come in the order of their last messages.
                last.pop(message.model, None)
                last[message.model] = message
                self.position = entry.decode()
        for message in last.values():
            await self._carry_out(message)

    async def run(self) -> None:
        """Carries out messages, for ever."""
        blocking = cast(Any, self._connections.blocking)
        while True:
            try:
                read = await blocking.xread({self._connections.keys.control: self.position}, block=BLOCK_MS)
            except CONNECTION_LOST as error:
                logs.warning("control reading delayed", cause=str(error))
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            for _, entries in read or ():
                for entry, fields in entries:
                    await self._carry_out(_decoder.decode(fields[b"m"]))
                    self.position = entry.decode()
                    self.changed.set()

    async def _carry_out(self, message: ControlMessage) -> None:
        try:
            if message.action == "unload":
                self._repository.unload(message.model)
            else:
                await asyncio.to_thread(self._load, message)
        except MeshError as error:
            # The registration tells it to whoever asked.
            logs.error("model not loaded", model=message.model, cause=error.message)

    def _load(self, message: ControlMessage) -> None:
        if not message.files:
            self._repository.load(message.model, message.config_json)
            return
        with TemporaryDirectory(prefix="seqmesh-model-") as folder:
            write_files(Path(folder) / message.model, message.files)
            self._repository.load(message.model, message.config_json, folder=Path(folder) / message.model)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Writes a load request's files (`file:1/model.pt` -> content). Raises MeshError for a path that leaves the
    folder."""
    for name, content in files.items():
        path = (folder / name.removeprefix("file:")).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise MeshError(f"file '{name}' must not leave the model's directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
