"""Clients that want a gateway's memory, each kind in its own way. As a program they run beside the test that watches:

python -m tests.gateway.hostile --grpc-port P --http-port P --clients N --seconds S
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gzip
import itertools
import json
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import hpack

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
ECHO = "/v2/models/echo/infer"
PIECE = bytes(1 << 18)
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
WINDOW = 65_535
FRAME_BYTES = 16_384
BURST_BYTES = 1 << 18
LINGER_S = 4.0
"""How long what was sent is left there."""
REST_S = 0.05
"""Between two attempts of one client: fifty must not need a machine of their own."""


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway's ports."""

    grpc_port: int
    http_port: int


class Grpc:
    """A connection of HTTP/2 that keeps to the windows, and reads what it is sent or does not. Frames are made here: h2
    takes a hundred times as long.

    reads    whether what comes as answers is acknowledged: otherwise its streams' windows stay at one byte
    refused  the texts with which calls have ended
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads
        self._window, self._initial = WINDOW, WINDOW
        self._windows: dict[int, int] = {}
        self._next = 1
        self._headers = hpack.Decoder()
        self._moved = asyncio.Event()
        self.refused: list[str] = []

    async def open(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        settings = b"" if self._reads else struct.pack(">HI", 4, 1)
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self._receiving = asyncio.create_task(self._receive())

    async def close(self) -> None:
        self._receiving.cancel()
        self._writer.close()
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def call(self, path: str) -> int:
        """Opens a stream; returns its number."""
        stream, self._next = self._next, self._next + 2
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        headers |= {"content-type": "application/grpc", "grpc-encoding": "gzip"}
        # Without the table that encoder and decoder share, streams need not be opened in order.
        block = b"".join(b"\x00%c%b%c%b" % (len(k), k.encode(), len(v), v.encode()) for k, v in headers.items())
        self._windows[stream] = self._initial
        await self._write(frame(HEADERS, END_HEADERS, stream, block))
        return stream

    async def send(self, stream: int, data: bytes) -> None:
        """Sends as the windows let it. Raises ConnectionError when the stream or the connection has been closed."""
        rest = memoryview(data)
        while rest:
            if stream not in self._windows or self._receiving.done():
                raise ConnectionError("it is closed")
            size = min(len(rest), self._windows[stream], self._window, BURST_BYTES)
            if size <= 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            self._windows[stream] -= size
            self._window -= size
            parts = (rest[begin : min(begin + FRAME_BYTES, size)] for begin in range(0, size, FRAME_BYTES))
            await self._write(b"".join(frame(DATA, 0, stream, bytes(part)) for part in parts))
            rest = rest[size:]

    async def message(self, stream: int, message: bytes, *, packed: bool = False) -> None:
        await self.send(stream, struct.pack(">BI", packed, len(message)) + message)

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _receive(self) -> None:
        try:
            while True:
                length, kind, flags, stream = struct.unpack(">I", b"\0" + await self._reader.readexactly(3)) + (
                    struct.unpack(">BBI", await self._reader.readexactly(6))
                )
                self._heard(kind, flags, stream, await self._reader.readexactly(length))
                self._moved.set()
        except (OSError, asyncio.IncompleteReadError):
            self._moved.set()

    def _heard(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        match kind:
            case 8:  # WINDOW_UPDATE
                (size,) = struct.unpack(">I", content)
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + size
                else:
                    self._window += size
            case 4 if not flags:
                for name, value in struct.iter_unpack(">HI", content):
                    if name == 4:  # INITIAL_WINDOW_SIZE
                        self._windows = {key: size + value - self._initial for key, size in self._windows.items()}
                        self._initial = value
                self._writer.write(frame(SETTINGS, ACK, 0, b""))
            case 6 if not flags:  # PING
                self._writer.write(frame(6, ACK, 0, content))
            case 1:
                headers: list[tuple[str, str]] = [(str(k), str(v)) for k, v in self._headers.decode(content)]
                self.refused += [value for name, value in headers if name == "grpc-message"]
            case 0 if content and self._reads:
                update = struct.pack(">I", len(content))
                self._writer.write(frame(8, 0, 0, update) + frame(8, 0, stream, update))
            case _:
                pass
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._windows.pop(stream, None)


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def request(size: int, model: str = "echo") -> bytes:
    """A good request to `echo`, which is answered with as much."""
    tensor = field(1, b"INPUT0") + field(2, b"FP32") + field(3, b"\x01" + varint(size // 4))
    return field(1, model.encode()) + field(5, tensor) + field(7, bytes(size))


def field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message; made here, for the messages' own module takes seconds to import."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """A whole number, as protobuf writes it."""
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


@functools.cache
def zeros_packed() -> bytes:
    """60 MiB in 60 KiB."""
    return gzip.compress(bytes(60 << 20), 9)


@contextlib.asynccontextmanager
async def connected(target: Target, *, reads: bool = True) -> AsyncGenerator[Grpc]:
    grpc = Grpc(reads=reads)
    await grpc.open(target.grpc_port)
    try:
        yield grpc
    finally:
        await grpc.close()


# -- gRPC -----------------------------------------------------------------------------------------------------------


async def bombs(target: Target) -> None:
    """Messages that unpack to a thousand times their size."""
    bomb = zeros_packed()
    async with connected(target) as grpc:
        for _ in range(4):
            await grpc.message(await grpc.call(INFER), bomb, packed=True)
        await asyncio.sleep(0.5)


async def whole(target: Target) -> None:
    """Large messages."""
    async with connected(target) as grpc:
        stream = await grpc.call(INFER)
        await grpc.message(stream, request(16 << 20, "nobody"))


async def unfinished(target: Target) -> None:
    """Messages that lack their end, on calls of every kind."""
    async with connected(target) as grpc:
        for path in (INFER, LIVE, STREAM, INFER):
            stream = await grpc.call(path)
            await grpc.send(stream, struct.pack(">BI", 0, 18 << 20))
            for _ in range(64):
                await grpc.send(stream, PIECE)
        await asyncio.sleep(LINGER_S)


async def small_parts(target: Target) -> None:
    """Messages of nothing but empty inputs, each of which becomes an object."""
    async with connected(target) as grpc:
        await grpc.message(await grpc.call(INFER), b"\x2a\x00" * (4 << 20))
        await asyncio.sleep(0.5)


async def unread_stream(target: Target) -> None:
    """Requests of a stream whose answers are not read."""
    async with connected(target, reads=False) as grpc:
        stream = await grpc.call(STREAM)
        for _ in range(200):
            await grpc.message(stream, request(1 << 20))
        await asyncio.sleep(LINGER_S)


async def unread_answers(target: Target) -> None:
    """Unary calls whose answers are not read."""
    async with connected(target, reads=False) as grpc:
        for _ in range(40):
            await grpc.message(await grpc.call(INFER), request(4 << 20))
        await asyncio.sleep(LINGER_S)


async def unread_window(target: Target) -> None:
    """Many calls that never send a whole message."""
    async with connected(target) as grpc:
        for _ in range(100):
            await grpc.send(await grpc.call(INFER), struct.pack(">BI", 0, 1 << 20) + bytes(50_000))
        await asyncio.sleep(LINGER_S)


# -- HTTP -----------------------------------------------------------------------------------------------------------


async def http(target: Target, headers: str, body: bytes, *, linger_s: float = 0.5) -> None:
    """One request, whose answer is not read."""
    _, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(f"POST {ECHO} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode())
        for begin in range(0, len(body), len(PIECE)):
            writer.write(body[begin : begin + len(PIECE)])
            await writer.drain()
        await asyncio.sleep(linger_s)
    finally:
        writer.close()


async def announced(target: Target) -> None:
    """Bodies of which the half comes."""
    await http(target, f"content-length: {16 << 20}", bytes(8 << 20), linger_s=LINGER_S)


async def packed(target: Target) -> None:
    """Bodies that unpack to a thousand times their size."""
    body = zeros_packed()
    await http(target, f"content-encoding: gzip\r\ncontent-length: {len(body)}", body)


async def bulky(target: Target) -> None:
    """JSON whose values take twenty times its size."""
    body = b'{"inputs":[' + b",".join(itertools.repeat(b"[]", 2 << 20)) + b"]}"
    await http(target, f"content-length: {len(body)}", body)


async def unread_responses(target: Target) -> None:
    """Answers that are not read."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1 << 20], "parameters": {"binary_data_size": 4 << 20}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = f"inference-header-content-length: {len(head)}\r\ncontent-length: {len(head) + (4 << 20)}"
    await http(target, headers, head + bytes(4 << 20), linger_s=LINGER_S)


async def half_open(target: Target) -> None:
    """Connections that say nothing, or half a word."""
    for port, word in ((target.grpc_port, b"PRI * HTTP/2.0\r\n"), (target.http_port, b"POST /v2 HTTP/1.1\r\nhost:")):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(word)
        await writer.drain()
    await asyncio.sleep(LINGER_S)


KINDS: tuple[Callable[[Target], Awaitable[None]], ...] = (
    *(bombs, whole, unfinished, small_parts, unread_stream, unread_answers, unread_window),
    *(announced, packed, bulky, unread_responses, half_open),
)


async def insist(kind: Callable[[Target], Awaitable[None]], target: Target, tried: set[str]) -> None:
    """Does it again and again, whatever the gateway does about it. tried: the kinds that have come to an end once."""
    while True:
        with contextlib.suppress(OSError):
            await kind(target)
        tried.add(kind.__name__)
        await asyncio.sleep(REST_S)


async def attack(target: Target, clients: int, seconds: float) -> None:
    """So many clients, of all kinds alike, for so long; a busy machine gets half a minute more to try each kind.

    By the clock: a busy loop comes round late, and the caller waits for the end.
    """
    zeros_packed()
    tried = set[str]()
    kinds = itertools.islice(itertools.cycle(KINDS), clients)
    tasks = [asyncio.create_task(insist(kind, target, tried)) for kind in kinds]
    done = set[asyncio.Task[None]]()
    end = time.monotonic() + seconds
    while not done and time.monotonic() < end + (0 if len(tried) == len(KINDS) else 30):
        done, _ = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(attack(Target(given.grpc_port, given.http_port), given.clients, given.seconds))
