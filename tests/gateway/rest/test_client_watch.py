"""The watch over a client that waits for its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.rest import client_watch
from gateway.rest.client_watch import ClientWatch
from tests.gateway.cycles import nothing_stays


async def test_an_answer_that_came_after_the_watch_had_begun_stays_in_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such answers may be large, and until the collector comes there may be hundreds."""
    monkeypatch.setattr(client_watch, "WATCH_AFTER_S", 0)
    watches = asyncio.Event()

    async def receive() -> Any:
        watches.set()
        await asyncio.Event().wait()

    async def handle() -> None:
        answer = asyncio.get_running_loop().create_future()
        with ClientWatch(receive) as client:
            await watches.wait()
            answer.set_result("answer")
            assert "answer" == await client.while_present(answer)

    async with nothing_stays(ClientWatch):
        await handle()
