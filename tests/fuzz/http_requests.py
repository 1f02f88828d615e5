"""Requests over HTTP, byte by byte, against a gateway process with a Redis and an executor that answers.

Each input is one connection: some requests, mutated in their heads, lengths, chunks, JSON or binary tensors, one after
the other or at once, in pieces, and a client that reads to the end, leaves, or resets the connection. An input passes
when what is heard are answers of HTTP/1.1 and the connection ends with its client. None of the answers may be a mistake
of the gateway's own, and its log may show none.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import socket
import struct
import zlib
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from gateway.settings import HttpParser
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis
from tests.fuzz.mutations import NUMBERS, mutated_bytes, mutated_json
from tests.gateway.fake_executor import FakeExecutor, echo, two_inputs
from tests.gateway.gateway_process import GatewayProcess, gateway_process

PREFIX = "fuzz"
NUMBERS_JSON = {
    "id": "a",
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1.5, 2, -3]}],
    "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": False, "classification": 2}}],
    "parameters": {"sequence_id": 5, "sequence_start": True, "timeout": 1_000_000, "priority": 0, "x": "y"},
}
TEXTS_JSON = {"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "é"]}]}
TENSORS = b"".join(struct.pack("<4i", *values) for values in ((1, 2, 3, 4), (5, 6, 7, 8)))
BINARY_JSON = {
    "inputs": [
        {"name": f"INPUT{index}", "datatype": "INT32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
        for index in range(2)
    ],
    "parameters": {"binary_data_output": True},
}
GENERATE_JSON = {"id": "a", "INPUT0": [1.5, 2, -3], "x": True, "parameters": {"timeout": 5, "y": "z"}}
INFER = (
    ("/v2/models/echo/infer", NUMBERS_JSON, b""),
    ("/v2/models/echo_text/infer", TEXTS_JSON, b""),
    ("/v2/models/add_sub/infer", BINARY_JSON, TENSORS),
    ("/v2/models/echo/generate", GENERATE_JSON, b""),
    ("/v2/models/echo_text/generate_stream", {"INPUT0": ["a", "é"], "sequence_id": 5}, b""),
)
OTHERS = (
    *(
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/echo",
        "/v2/models/echo/versions/1",
        "/v2/models/stats",
    ),
    *(
        "/v2/models/echo/config",
        "/v2/models/echo/ready",
        "/v2/repository/index",
        "/v2/models/echo/generate",
        "/metrics",
    ),
    *("/v2/systemsharedmemory/status", "/v2/logging", "/v2/trace/setting", "/", "*", "http://x/v2", "/v2/%00%ff/../x"),
    *("/v2/models/" + "a" * 9000, "/v2/models/stats?x=" + "%" * 50, "/v2/models/echo/versions/" + "9" * 400),
)
METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"M" * 300, b"")
VERSIONS = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/9.9", b"HTTP/1", b"HTCPCP/1.0", b"")
ENDS = (b"\n", b"\r", b"\r\r\n", b"\0\r\n", b"\r\n ")
HEADERS = (
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 24,
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Content-Length: 3",
    b"Accept-Encoding: gzip;q=0.5, deflate, br;q=nan",
    b"Content-Encoding: br",
    b"Content-Encoding: gzip",
    b"traceparent: 00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-ff",
    b"Inference-Session-Id: \xff\xfe",
    b"Host: y",
    b"X-" + b"a" * 20_000 + b": b",
    b": no name",
    b"no colon",
    b"A: b\r\n c: folded",
    b"X: \x01\x7f\xff",
)
HEALTHY = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ANSWER = re.compile(rb"HTTP/1\.1 [1-5]\d\d ")
BOMBS = (1 << 20, 100 << 20)
"""Bytes to which a small body unpacks; the gateway takes 64 MiB."""
MISTAKES = (b"unexpectedly", b"never retrieved", b"Error in ASGI", b"Traceback")
"""In the log."""
MISTAKE = b"internal error in the gateway"
"""In an answer."""


def request(chance: random.Random) -> bytes:
    """One request, more or less in order."""
    if chance.random() < 0.4:
        method = chance.choice(METHODS) if chance.random() < 0.3 else b"GET"
        path, body, header_length = chance.choice(OTHERS), chance.randbytes(chance.choice((0, 0, 10, 3000))), None
    else:
        method = b"POST"
        path, document, binary = chance.choice(INFER)
        text = json.dumps(document) if chance.random() < 0.3 else mutated_json(chance, document)
        header = text.encode(errors="surrogatepass")
        body, header_length = header + binary, len(header) if binary else None
        if binary and chance.random() < 0.3:
            header_length = chance.choice(NUMBERS)
    lines = [b"Host: x", *chance.sample(HEADERS, chance.choice((0, 0, 0, 1, 2, 5)))]
    if header_length is not None:
        lines.append(b"Inference-Header-Content-Length: %s" % str(header_length).encode())
    body = packed(chance, body, lines)
    version = chance.choice(VERSIONS) if chance.random() < 0.05 else b"HTTP/1.1"
    body = framed(chance, body, lines)
    chance.shuffle(lines)
    end = chance.choice(ENDS) if chance.random() < 0.03 else b"\r\n"
    head = end.join((b" ".join((method, path.encode(), version)), *lines, b"", b""))
    return mutated_bytes(chance, head) + body if chance.random() < 0.15 else head + body


def packed(chance: random.Random, body: bytes, lines: list[bytes]) -> bytes:
    """Now and then compressed, and sometimes that is broken."""
    match chance.randrange(20):
        case 0:
            lines.append(b"Content-Encoding: gzip")
            body = gzip.compress(body)
        case 1:
            lines.append(b"Content-Encoding: deflate")
            body = zlib.compress(body)
        case 2:
            lines.append(b"Content-Encoding: gzip")
            body = bomb(chance.choice(BOMBS))
        case _:
            pass
    return mutated_bytes(chance, body) if chance.random() < 0.1 else body


@cache
def bomb(size: int) -> bytes:
    """A little that unpacks to much."""
    return gzip.compress(bytes(size), 9)


def framed(chance: random.Random, body: bytes, lines: list[bytes]) -> bytes:
    """With its length, or in chunks; seldom with a wrong length, or with broken chunks."""
    odd = chance.random() < 0.12
    if chance.random() < 0.6:
        length = chance.choice((*NUMBERS, len(body) + 1, len(body) - 1, f"+{len(body)}", "0x10", "1, 1"))
        lines.append(b"Content-Length: %s" % str(length if odd else len(body)).encode())
        return body
    lines.append(b"Transfer-Encoding: chunked")
    size = chance.choice((1, 7, 1000, 100_000))
    size = max(size, len(body) // 500)
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    extension = chance.choice((b"", b"", b";a=b", b' ;x="y"'))
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    chunks += b"0\r\n" + chance.choice((b"", b"", b"Trailer: x\r\n")) + b"\r\n"
    return mutated_bytes(chance, chunks) if odd else chunks


class HttpRequests:
    """The fuzzer (`fuzzing.Fuzzer`).

    heard  answers by status, so that a run can be seen to have tried something
    """

    at_once = 8
    memory_bytes_max = 700 << 20
    """Bodies that unpack to 100 MiB are among the inputs, of which the gateway takes 64 MiB of each."""
    health_s_max = 20.0
    """Of the machine's slowness: on a quiet one it takes milliseconds."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self.heard: Counter[int] = Counter()

    def attacked(self) -> list[int]:
        return [self._gateway.process.pid]

    async def attack(self, chance: random.Random) -> None:
        data = b"".join(request(chance) for _ in range(chance.choice((1, 1, 1, 2, 5))))
        if chance.random() < 0.05:
            data = mutated_bytes(chance, data)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway.ports["http"])
        try:
            # The other side may have ended the connection, or wait for us to read.
            with contextlib.suppress(OSError):
                heard = b""
                answers = asyncio.create_task(reader.read())
                try:
                    await self._send(chance, writer, data)
                    match chance.randrange(8):
                        case 0:
                            return
                        case 1:
                            reset(writer)
                            return
                        case _:
                            writer.write_eof()
                            heard = await answers
                finally:
                    answers.cancel()
                    await asyncio.gather(answers, return_exceptions=True)
                self._judge(heard)
        finally:
            writer.close()

    async def _send(self, chance: random.Random, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = chance.choice((len(data), len(data), 1000, 50, 3))
        size = max(size, len(data) // 200, 1)
        for begin in range(0, len(data), size):
            writer.write(data[begin : begin + size])
            await writer.drain()
            if chance.random() < 0.2:
                await asyncio.sleep(0)

    def _judge(self, heard: bytes) -> None:
        assert not heard or ANSWER.match(heard), f"no answer of HTTP/1.1: {heard[:200]!r}"
        assert MISTAKE not in heard, f"a mistake of the gateway's: {heard[heard.index(MISTAKE) :][:200]!r}"
        if heard:
            self.heard[int(heard[9:12])] += 1

    async def health(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway.ports["http"])
        writer.write(HEALTHY)
        heard = await reader.read()
        writer.close()
        assert heard.startswith(b"HTTP/1.1 200 "), f"health: {heard[:200]!r}"
        for mistake in MISTAKES:
            if mistake in self._gateway.said:
                seen = bytes(self._gateway.said[-3000:]).decode(errors="replace")
                self._gateway.said.clear()
                raise AssertionError(f"in the log: {seen}")


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset instead of in order."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def fuzzer(folder: Path, parser: HttpParser = "llhttp") -> AsyncGenerator[HttpRequests]:
    """Starts Redis and a gateway; the executor runs in this process."""
    for size in BOMBS:
        bomb(size)
    with EmbeddedRedis(folder / "redis") as server:
        redis = connect(server.url)
        executor = FakeExecutor(
            redis, Keyspace(PREFIX), models=(echo(), echo("echo_text", "BYTES"), two_inputs()), control_mode="none"
        )
        await executor.join()
        running = asyncio.create_task(executor.run())
        try:
            async with gateway_process(server.url, PREFIX, f"--http-parser={parser}") as gateway:
                yield HttpRequests(gateway)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await redis.aclose()
