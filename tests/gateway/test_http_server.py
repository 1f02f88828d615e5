"""Connections end with their clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.http_server import HttpServer, listen
from gateway.rest.reply import send_bytes

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SOON_S = 60.0
"""A tenth of the time for which a connection may be idle."""


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers everybody alike."""
    if scope["type"] == "http":
        await send_bytes(send, 200, b"hello")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Where a server listens."""
    server = HttpServer(hello)
    listening = listen("127.0.0.1", 0)
    await server.start(listening)
    yield listening.getsockname()[1]
    await server.stop(1.0, see_off_s=0.0)


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
