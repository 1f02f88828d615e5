"""The launcher's door for its own console: a socket in the data directory, by which it kills an executor on request.

Only processes of the same user reach the socket. One request and one reply, each a line of JSON, per connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from shared.contract.errors import UnavailableError

TIMEOUT_S = 5.0
LINE_BYTES_MAX = 4096


class ControlError(UnavailableError):
    """The launcher refuses, or is not there; the text says why."""


class ControlRequest(msgspec.Struct, frozen=True):
    """kill: name of an executor; "" only asks which there are"""

    kill: str = ""


class ControlReply(msgspec.Struct, frozen=True):
    """executors: their names; error: why nothing was killed, "" if it was"""

    executors: tuple[str, ...] = ()
    error: str = ""


@asynccontextmanager
async def control_served(path: Path, executors: Sequence[str], kill: Callable[[str], str]) -> AsyncGenerator[None]:
    """Listens for the block. kill: called with an executor's name; returns why it was not killed, "" if it was"""

    def reply_to(line: bytes) -> ControlReply:
        try:
            request = msgspec.json.decode(line, type=ControlRequest)
        except msgspec.MsgspecError as error:
            return ControlReply(error=f"this is no request: {error}")
        return ControlReply(tuple(executors), kill(request.kill) if request.kill else "")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(msgspec.json.encode(reply_to(await reader.readline())) + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            # The other side is gone, silent (TimeoutError), or sends a line without an end: it hears nothing.
            pass
        finally:
            writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, path, limit=LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def ask_to_kill(path: Path, executor: str) -> None:
    """Has the launcher kill an executor. Raises ControlError if it does not."""
    reply = await _asked(path, ControlRequest(executor))
    if reply.error:
        raise ControlError(reply.error)


async def killable_executors(path: Path) -> frozenset[str]:
    """The executors of the launcher, by name. Raises ControlError."""
    return frozenset((await _asked(path, ControlRequest())).executors)


async def _asked(path: Path, request: ControlRequest) -> ControlReply:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
            try:
                writer.write(msgspec.json.encode(request) + b"\n")
                return msgspec.json.decode(await reader.readline(), type=ControlReply)
            finally:
                writer.close()
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ControlError(f"the launcher does not answer: {error}") from error
