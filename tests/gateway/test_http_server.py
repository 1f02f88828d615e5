"""Connections end with their clients."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.http_server import HttpServer, listen
from gateway.rest.reply import send_bytes
from gateway.settings import Certificate

TLS = Path(__file__).parents[1] / "fixtures" / "tls"
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE_BYTES = 32 << 20
"""More than all buffers between two processes take."""
SOON_S = 60.0
"""A tenth of the time for which a connection may be idle."""


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everybody alike."""
    if scope["type"] == "http":
        await send_bytes(send, 200, b"hello")


async def large(scope: Any, receive: Any, send: Any) -> None:
    """One whose answers are large."""
    await send_bytes(send, 200, bytes(LARGE_BYTES))


@contextlib.asynccontextmanager
async def serving(app: Any, certificate: Certificate | None = None) -> AsyncGenerator[int]:
    """Where a server of that application listens."""
    server = HttpServer(app, certificate)
    listening = listen("127.0.0.1", 0)
    await server.start(listening)
    yield listening.getsockname()[1]
    await server.stop(1.0, see_off_s=0.0)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where a server listens."""
    async with serving(hello) as port:
        yield port


@pytest.mark.parametrize("requests", [0, 1, 2])
async def test_a_connection_that_its_client_closes_is_closed_at_once(port: int, requests: int) -> None:
    """And not kept for as long as an idle one: each holds a descriptor, of which a process has about a thousand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(SOON_S):
        for _ in range(requests):
            writer.write(REQUEST)
            await reader.readuntil(b"hello")
        writer.write_eof()

        assert b"" == await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_does_not_take_its_answer_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its answer is not kept for ever."""
    monkeypatch.setattr("gateway.http_server.PATIENCE_S", 0.2)
    given_up = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await large(scope, receive, send)
        given_up.set()

    async with serving(app) as port, asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(REQUEST)
        await given_up.wait()
        cast("asyncio.Transport", writer.transport).resume_reading()

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(LARGE_BYTES)
        writer.close()


async def test_a_client_that_has_taken_much_of_its_answer_may_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a body that comes: what counts is the pace since the beginning."""
    monkeypatch.setattr("gateway.http_server.PATIENCE_S", 0.2)
    monkeypatch.setattr("gateway.http_server.SLOWEST_BYTES_S", 1)
    async with serving(large) as port, asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(LARGE_BYTES // 2)
        await asyncio.sleep(0.6)

        assert LARGE_BYTES // 2 == len(await reader.readexactly(LARGE_BYTES // 2))
        writer.close()


async def test_nobody_waits_for_ever_for_the_rest_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TLS all of an answer is handed on at once, and the end of the connection waits until it has been taken."""
    monkeypatch.setattr("gateway.http_server.PATIENCE_S", 0.2)
    trusting = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    certificate = Certificate(str(TLS / "server.pem"), str(TLS / "server.key"))
    async with serving(large, certificate) as port, asyncio.timeout(SOON_S):
        others = asyncio.all_tasks()
        _, writer = await asyncio.open_connection("localhost", port, ssl=trusting)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        while not asyncio.all_tasks() - others:
            await asyncio.sleep(0.01)
        while asyncio.all_tasks() - others:
            await asyncio.sleep(0.01)
        writer.transport.abort()
