"""A client that speaks HTTP/2 frame by frame: h2's client side on a real connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from hyperframe.frame import GoAwayFrame

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
SOON_S = 60.0


class ClientSide(H2Connection):
    """h2's, which goes on when the server says GOAWAY. goaways: last call, code and text of each"""

    def __init__(self) -> None:
        super().__init__(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.goaways: list[tuple[int, int, bytes]] = []

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Any]]:
        self.goaways.append((frame.last_stream_id, int(frame.error_code), frame.additional_data))
        return [], []


class Peer:
    """headers, trailers, data: what has come for a call. ended, reset: how it ended"""

    def __init__(self) -> None:
        self.h2 = ClientSide()
        self.headers: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        self.closed = False
        self._changed = asyncio.Event()
        self.credits = True

    async def open(self, port: int) -> None:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.h2.initiate_connection()
        self.flush()
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reading.cancel()
        self.writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def call(self, path: str, headers: Sequence[tuple[str, str]] = (), *, end: bool = False, **replaced: str) -> int:
        """Opens a call; returns its number."""
        number = self.h2.get_next_available_stream_id()
        said = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        said |= {"content-type": "application/grpc"} | {
            name.replace("_", "-"): value for name, value in replaced.items()
        }
        self.h2.send_headers(number, [*said.items(), *headers], end_stream=end)
        self.flush()
        return number

    def say(self, number: int, message: bytes, *, end: bool = True) -> None:
        self.h2.send_data(number, struct.pack(">BI", 0, len(message)) + message, end_stream=end)
        self.flush()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def status(self, number: int) -> tuple[str, str]:
        """How a call has ended: number and text of its status."""
        await self.until(lambda: "grpc-status" in self.headers.get(number, {}) or self.closed)
        headers = self.headers[number]
        return headers["grpc-status"], headers.get("grpc-message", "")

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(1 << 16):
                for event in self.h2.receive_data(data):
                    self._heard(event)
                self.flush()
                self._changed.set()
        except OSError:
            pass
        finally:
            self.closed = True
            self._changed.set()

    def _heard(self, event: Any) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                said = self.headers.setdefault(event.stream_id, {})
                said.update((str(name), str(value)) for name, value in event.headers)
            case DataReceived():
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                if self.credits:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamEnded():
                self.ended.add(event.stream_id)
            case StreamReset():
                self.reset[event.stream_id] = int(event.error_code)
            case _:
                pass


@asynccontextmanager
async def peer_of(port: int) -> AsyncGenerator[Peer]:
    peer = Peer()
    await peer.open(port)
    try:
        yield peer
    finally:
        await peer.close()
