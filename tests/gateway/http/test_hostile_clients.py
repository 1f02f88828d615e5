"""A gateway process with few descriptors among clients that hold on to their connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import cast, get_args

import aiohttp
import pytest

from gateway.bounds.descriptors import METRICS
from gateway.ports.serving import TELL_S
from gateway.settings import HttpParser
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.gateway_process import GRACE, GatewayProcess, gateway_process

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
pytestmark = pytest.mark.timeout(300)
DESCRIPTORS = 200
SLOW_CLIENTS = 300
SOON_S = 60.0
ECHO = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: x\r\n"
HEALTH = "/v2/health/live"
ANSWER_BYTES = 8 << 20
INFER = (
    b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
    % (
        ANSWER_BYTES // 4,
        ANSWER_BYTES,
    )
    + b'"parameters":{"binary_data_output":true}}'
)
BULKY = (
    ECHO
    + b"inference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n" % (len(INFER), len(INFER) + ANSWER_BYTES)
    + INFER
    + b"\1" * ANSWER_BYTES
)


@pytest.fixture(params=get_args(HttpParser))
async def process(
    request: pytest.FixtureRequest, redis_url: str, executor: FakeExecutor
) -> AsyncGenerator[GatewayProcess]:
    parser = f"--http-parser={request.param}"
    async with gateway_process(redis_url, executor.keys.prefix, parser, GRACE, descriptors=DESCRIPTORS) as process:
        yield process


@asynccontextmanager
async def clients(
    port: int, count: int, sent: bytes, *, of_each: int = 10
) -> AsyncGenerator[list[asyncio.StreamWriter]]:
    """Connections that have sent that and do not read; from addresses of their own, so many of each."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(count):
            address = (f"127.1.{number // of_each // 250}.{number // of_each % 250 + 1}", 0)
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=address)
            cast("asyncio.Transport", writer.transport).pause_reading()
            writer.write(sent)
            writers.append(writer)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.05)


async def status(port: int, path: str) -> int:
    """Of a request on a connection of its own, until there is room for it."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://127.0.0.1:{port}{path}") as response,
                ):
                    if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                        return response.status
            except (aiohttp.ClientConnectionError, ConnectionError):
                pass
            await asyncio.sleep(0.1)


SLOW = {
    "http": (b"", ECHO, ECHO + b"content-length: 1000\r\n\r\n{"),
    "metrics": (b"", b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"),
    "grpc": (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))),
}
"""What slow clients have sent when they stop sending, by port."""


async def test_health_and_metrics_answer_beside_slow_clients(process: GatewayProcess) -> None:
    """On whatever port they are; and the log says that there are too many, once a minute for a port, not for each of
    them."""
    began = time.monotonic()
    for port, kinds in SLOW.items():
        for sent in kinds:
            async with clients(process.ports[port], SLOW_CLIENTS, sent):
                assert await status(process.ports["metrics"], "/metrics") == 200
                assert await status(process.ports["http"], HEALTH) == 200

    most = len(SLOW) + (time.monotonic() - began) // TELL_S
    assert 1 <= process.said.count(b"connections refused") <= most, process.said.decode()


@pytest.mark.parametrize(("of_each", "path"), [(METRICS // 2, HEALTH), (METRICS, "/metrics")])
async def test_the_metrics_port_answers_beside_clients_that_keep_it_busy(
    process: GatewayProcess, of_each: int, path: str
) -> None:
    """At once: how the gateway is, whoever asks, and one client leaves room for the metrics, too."""
    port, busy = process.ports["metrics"], b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 3000
    async with (
        clients(port, METRICS, busy, of_each=of_each),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as response,
    ):
        assert response.status == 200


async def test_clients_that_never_close_their_side_of_tls_keep_nobody_out(
    redis_url: str, executor: FakeExecutor
) -> None:
    """They lose their seats, and their files with them: otherwise the gateway could open no other, on no port."""
    cert, key = TLS / "server.pem", TLS / "server.key"
    http = (f"--http-server-cert={cert}", f"--http-server-key={key}")
    grpc = ("--grpc-use-ssl", f"--grpc-server-cert={cert}", f"--grpc-server-key={key}")
    context = ssl.create_default_context(cafile=TLS / "ca.pem")
    async with gateway_process(redis_url, executor.keys.prefix, *http, *grpc, descriptors=DESCRIPTORS) as process:
        for port in (process.ports["http"], process.ports["grpc"]):
            made = [await asyncio.to_thread(tls_connection, port, context, number) for number in range(SLOW_CLIENTS)]
            with tls_connection(process.ports["http"], context, SLOW_CLIENTS) as one:
                one.sendall(b"GET " + HEALTH.encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await asyncio.to_thread(one.recv, 15)) == b"HTTP/1.1 200 OK"
            for one in made:
                one.close()

    assert b"Too many open files" not in process.said


def tls_connection(port: int, context: ssl.SSLContext, number: int) -> ssl.SSLSocket:
    """One that reads only when it is told to, unlike asyncio's. Tried until there is room for it."""
    address = (f"127.2.{number // 250}.{number % 250 + 1}", 0)
    until_s = time.monotonic() + SOON_S
    while True:
        try:
            plain = socket.create_connection(("127.0.0.1", port), SOON_S, address)
            return context.wrap_socket(plain, server_hostname="localhost")
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.05)


async def test_clients_that_do_not_take_their_answers_leave_nothing(process: GatewayProcess) -> None:
    """Some leave within the answer, some never read: memory and connections come back, and a stop is quick."""
    before = 0
    for number in range(13):
        if number == 3:
            before = process.memory_bytes
        reader, writer = await asyncio.open_connection("127.0.0.1", process.ports["http"])
        writer.write(BULKY)
        assert (await reader.readexactly(65_536)).startswith(b"HTTP/1.1 200 ")
        writer.close()
    await until(lambda: process.http_connections == 0)

    # Of ten. The last one's goes back a moment after its connection.
    await until(lambda: process.memory_bytes - before < 5 * ANSWER_BYTES)
    async with clients(process.ports["http"], 5, BULKY):
        assert await status(process.ports["http"], HEALTH) == 200

        await process.stop()


async def test_a_stop_does_not_wait_for_what_does_not_come(process: GatewayProcess) -> None:
    heads = clients(process.ports["http"], 5, ECHO)
    bodies = clients(process.ports["http"], 5, ECHO + b"content-length: 1000\r\n\r\n{")
    async with heads, bodies:
        await until(lambda: process.http_connections == 10)

        await process.stop()
