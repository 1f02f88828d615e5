"""Bodies that are being received count, and are received in bounded time; a refusal reaches its client."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import MemoryBound
from gateway.settings import GatewaySettings
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running

ROOM = 1_000_000
ECHO = "/v2/models/echo/infer"
SOON_S = 60.0


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[ByteBudget]:
    """Those of the gateways that this test starts."""
    made: list[ByteBudget] = []

    def make(bytes_max: int, memory: MemoryBound) -> ByteBudget:
        made.append(ByteBudget(bytes_max, memory))
        return made[-1]

    monkeypatch.setattr("gateway.parts.ByteBudget", make)
    return made


@pytest.fixture
async def small_gateway(
    gateway_settings: GatewaySettings, executor: FakeExecutor, budgets: list[ByteBudget]
) -> AsyncIterator[RunningGateway]:
    """Has room for one megabyte of requests."""
    async with gateway_running(dataclasses.replace(gateway_settings, max_bytes_in_flight=ROOM)) as gateway:
        yield gateway


def content(size: int) -> bytes:
    """A request of so many bytes that can be answered."""
    document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    return json.dumps(document).encode().ljust(size)


class Client:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self, *headers: str) -> None:
        lines = (f"POST {ECHO} HTTP/1.1", "host: x", *headers, "", "")
        await self.send("\r\n".join(lines).encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers, document."""
        async with asyncio.timeout(SOON_S):
            status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            document = await self._reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(document)

    async def ended(self) -> bool:
        async with asyncio.timeout(SOON_S):
            return await self._reader.read() == b""


@asynccontextmanager
async def connected(gateway: RunningGateway, address: str = "127.0.0.1") -> AsyncGenerator[Client]:
    """address: which client it is"""
    port = gateway.addresses.http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def counted(budgets: list[ByteBudget], size: int) -> None:
    """Returns when the gateway has counted so many bytes: until then they may be on their way. A request that came
    meanwhile would take room from them, and they could be the ones that are refused."""
    (budget,) = budgets
    async with asyncio.timeout(SOON_S):
        while budget.taken < size:
            await asyncio.sleep(0)


async def refusal(client: Client, size: int) -> Any:
    """What a body of that size hears, for which there is no room."""
    await client.head(f"content-length: {size}")
    await client.send(content(size))
    status, _, document = await client.answer()
    return status, document["error"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_what_is_being_received_counts_and_a_refusal_leaves_the_connection_as_it_is(
    small_gateway: RunningGateway, budgets: list[ByteBudget], chunked: bool
) -> None:
    async with connected(small_gateway) as slow, connected(small_gateway) as other:
        whole = content(900_000)
        if chunked:
            await slow.head("transfer-encoding: chunked")
            await slow.send(b"%x\r\n%b\r\n" % (800_000, whole[:800_000]))
        else:
            # What is announced counts before it is there.
            await slow.head(f"content-length: {len(whole)}")

        await counted(budgets, 800_000 if chunked else 900_000)
        status, error = await refusal(other, 300_000)

        assert status == 503
        assert (
            f"requests of {8 if chunked else 9}00000 bytes in flight, of at most {ROOM - ROOM // 8}, and this one"
            in error
        )
        await other.head("content-length: 1000")
        await other.send(content(1000))
        assert (await other.answer())[0] == 200

        await slow.send(b"%x\r\n%b\r\n0\r\n\r\n" % (100_000, whole[800_000:]) if chunked else whole)
        assert (await slow.answer())[0] == 200
        await other.head("content-length: 950000")
        await other.send(content(950_000))
        assert (await other.answer())[0] == 200


async def test_a_client_whose_bodies_do_not_come_leaves_room_to_others(
    small_gateway: RunningGateway, budgets: list[ByteBudget]
) -> None:
    async with connected(small_gateway) as other, AsyncExitStack() as stack:
        for _ in range(15):
            greedy = await stack.enter_async_context(connected(small_gateway, "127.0.0.2"))
            await greedy.head("content-length: 50000")
        await counted(budgets, 15 * 50_000)
        status, error = await refusal(await stack.enter_async_context(connected(small_gateway, "127.0.0.2")), 50_000)
        assert (503, True) == (status, "this client has requests of 750000 bytes in flight, of at most 76562" in error)

        await other.head("content-length: 100000")
        await other.send(content(100_000))
        assert 200 == (await other.answer())[0]


@pytest.mark.parametrize(
    ("target", "header", "expected"),
    [
        ("POST /nowhere", "x: y", 404),
        ("POST /v2/health/live", "x: y", 405),
        ("POST /v2/models/nobody/generate", "x: y", 404),
        ("POST /v2/cudasharedmemory/register", "x: y", 501),
        (f"POST {ECHO}", "inference-header-content-length: x", 400),
        (f"POST {ECHO}", "content-encoding: br", 501),
        ("GET /v2/models/none", "x: y", 404),
    ],
)
async def test_an_answer_before_the_body_leaves_the_connection_or_says_that_it_ends(
    small_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, target: str, header: str, expected: int
) -> None:
    """Whoever gives it."""
    head = f"{target} HTTP/1.1\r\nhost: x\r\n{header}\r\ncontent-length: 1000\r\n\r\n".encode()
    lingers = [f"gateway.http.{module}.LINGER_S" for module in ("hypercorn_protocol", "llhttp_connection")]
    for linger_s in lingers:
        monkeypatch.setattr(linger_s, SOON_S)
    async with connected(small_gateway) as client:
        for _ in range(2):
            await client.send(head)
            await asyncio.sleep(0)
            await client.send(bytes(1000))
            status, headers, _ = await client.answer()
            assert (expected, None) == (status, headers.get("connection"))

        if "content-encoding" not in header:
            for linger_s in lingers:
                monkeypatch.setattr(linger_s, 0.1)
            await client.send(head)
            status, headers, _ = await client.answer()
            assert (expected, "close") == (status, headers["connection"])
            assert await client.ended()


async def test_a_client_that_sends_all_before_it_reads_hears_the_refusal(
    small_gateway: RunningGateway, budgets: list[ByteBudget]
) -> None:
    def sent_and_heard() -> bytes:
        with socket.create_connection(("127.0.0.1", small_gateway.addresses.http_port), timeout=SOON_S) as connection:
            size = 20_000_000
            connection.sendall(f"POST {ECHO} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
            for _ in range(20):
                connection.sendall(bytes(size // 20))
            return connection.recv(1000)

    async with connected(small_gateway) as slow:
        await slow.head("transfer-encoding: chunked")
        await slow.send(b"%x\r\n%b\r\n" % (900_000, bytes(900_000)))
        await counted(budgets, 900_000)

        assert (await asyncio.to_thread(sent_and_heard)).startswith(b"HTTP/1.1 503 ")


async def test_what_a_body_unpacks_to_counts_too(small_gateway: RunningGateway) -> None:
    async with connected(small_gateway) as slow, aiohttp.ClientSession(f"http://{small_gateway.url}") as session:
        await slow.head("content-length: 100000")
        packed = gzip.compress(bytes(50_000_000))
        async with asyncio.timeout(SOON_S):
            while True:
                headers = {"content-encoding": "gzip"}
                async with session.post(ECHO, data=packed, headers=headers) as response:
                    error = (await response.json())["error"]
                if response.status == 503:
                    break
        assert f"requests of 100000 bytes in flight, of at most {ROOM - ROOM // 8}" in error

        async with session.post(ECHO, data=gzip.compress(content(500_000)), headers=headers) as response:
            assert response.status == 200


async def test_a_body_that_does_not_come_is_given_up_and_its_room_is_free(
    small_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.connection.PATIENCE_S", 0.1)
    async with connected(small_gateway) as slow:
        await slow.head(f"content-length: {ROOM}")
        await slow.send(b"{")

        status, headers, document = await slow.answer()

        assert (408, "close") == (status, headers["connection"])
        assert "the request's body does not come: 1 bytes" in document["error"]
        assert await slow.ended()
    monkeypatch.undo()
    async with connected(small_gateway) as other:
        await other.head(f"content-length: {ROOM}")
        await other.send(content(ROOM))
        assert (await other.answer())[0] == 200
