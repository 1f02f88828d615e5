"""Servers of HTTP for applications of a test."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from gateway.http.server import HttpServer, Served
from gateway.ports.listening import listen
from gateway.ports.seats import Share


@asynccontextmanager
async def running(*served: Served, **given: Any) -> AsyncGenerator[HttpServer]:
    """A server of these on a free port. given: what else `HttpServer` takes"""
    server = HttpServer(*served, **given)
    await server.start(listen("127.0.0.1", 0))
    try:
        yield server
    finally:
        await server.stop(1.0, see_off_s=0.0)


@asynccontextmanager
async def serving(app: Any, **given: Any) -> AsyncGenerator[int]:
    """Where a server of that application listens."""
    async with running(Served(app, Share(100, 100)), **given) as server:
        yield server.port
