"""A gateway without ports, the steps that tests send it, and a proxy that breaks its connections to Redis."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from gateway.parts import GatewayParts, running_parts
from gateway.requests.admission import Admitted
from gateway.requests.exchange.departures import Departures
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer, PendingRequest
from gateway.settings import GatewaySettings
from shared.contract.ids import SequenceId, ShardId, sequence_id
from shared.contract.messages import InferMessage, ModelRecord
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor
from shared.process.lifecycle import Tasks
from shared.store.keyspace import Keyspace
from shared.traces.tracing import Tracing


@asynccontextmanager
async def without_ports(settings: GatewaySettings, keys: Keyspace) -> AsyncGenerator[GatewayParts]:
    """A gateway without ports."""
    async with (
        asyncio.TaskGroup() as group,
        running_parts(settings.bounded(), "gateway", keys, Tracing(), Tasks(group)) as parts,
    ):
        yield parts


def step(value: int, sequence: int | str = 1, *, start: bool = False, **rest: Any) -> InferCall:
    raw = struct.pack("<i", value)
    return InferCall(
        "running_sum",
        correlation_id=sequence,
        start=start,
        inputs=(Tensor("INPUT", "INT32", (1, 1), raw),),
        **rest,
    )


def total(answer: Any) -> int:
    return struct.unpack("<i", answer.message.outputs[0].raw)[0]


async def settled(parts: GatewayParts, count: int) -> None:
    """Waits until the gateway has heard what Redis says of so many requests, all in all. What the executor answers
    comes over another connection, and may be faster.
    """
    async with asyncio.timeout(60):
        while parts.dispatch.sent < count:
            await asyncio.sleep(0.005)


def departures_of(parts: GatewayParts) -> Departures:
    """One server has one."""
    (departures,) = set(parts.dispatch._departures.values())
    return departures


SEQUENCE = sequence_id("model", "", 5)
NOBODY_WAITS = cast("asyncio.Future[Answer]", None)


def pending(
    config: ModelConfig,
    call: InferCall | None = None,
    *,
    sequence: SequenceId | None = SEQUENCE,
    flags: int = 0,
    token: str = "1",
    future: asyncio.Future[Answer] = NOBODY_WAITS,
) -> PendingRequest:
    """A request to a model, as if it had been admitted: by default a step of sequence 5."""
    admitted = Admitted(InferMessage(config.name, "1", "", 5, ()), sequence=sequence, flags=flags)
    record = ModelRecord(config, "{}", ("1",))
    return PendingRequest(call or InferCall(config.name), record, admitted, future, shard=ShardId(0), token=token)


def is_submit(chunk: bytes) -> bool:
    return b"FCALL" in chunk and b"running_sum|" in chunk


class Proxy:
    """A TCP proxy before Redis that can be told to break connections.

    cut_after   called with what a client sends; True: it is passed on, but the connection is cut before the reply
    cut_before  as cut_after, but it is not passed on
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._open: set[asyncio.StreamWriter] = set()
        self.cut_after: Callable[[bytes], bool] = lambda _: False
        self.cut_before: Callable[[bytes], bool] = lambda _: False
        self.refuses = False
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def cut_all(self) -> None:
        for writer in self._open:
            writer.close()

    def refuses_behind_submit(self, chunk: bytes) -> bool:
        """To be `cut_after`: from the next submit on, Redis cannot be reached."""
        if is_submit(chunk):
            self.refuses = True
            asyncio.get_running_loop().call_soon(self.cut_all)
        return self.refuses

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        there, back = await asyncio.open_connection(*self._target)
        self._open |= {writer, back}
        if self.refuses:
            # Said while the target was connected to: `cut_all` has not seen this connection.
            writer.close()
            back.close()
        replies = asyncio.create_task(self._copy(there, writer))
        try:
            while chunk := await reader.read(1 << 16):
                if self.cut_before(chunk):
                    self.cut_before = lambda _: False
                    break
                back.write(chunk)
                if self.cut_after(chunk):
                    self.cut_after = lambda _: False
                    replies.cancel()
                    await asyncio.sleep(0.05)
                    break
        except ConnectionError:
            pass
        finally:
            for each in (writer, back):
                self._open.discard(each)
                each.close()
            await asyncio.gather(replies, return_exceptions=True)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
        writer.close()
