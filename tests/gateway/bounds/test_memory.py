"""A gateway's memory: what it may take, how that is shared out, and what happens near the bound."""

from __future__ import annotations

import asyncio
import dataclasses

import click
import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import (
    FULL_PART,
    TIGHT_PART,
    MemoryBound,
    resident_bytes,
)
from gateway.bounds.unread_answers import MUCH_BYTES, UnreadAnswers
from gateway.requests.infer_call import InferCall
from gateway.settings import GatewaySettings
from shared.contract.errors import MeshError, UnavailableError
from shared.contract.limits import GATEWAY_MEMORY_MIN
from shared.process.machine import available_bytes
from tests.gateway.cycles import nothing_stays
from tests.gateway.fake_executor import RunningGateway

GIB = 1 << 30


@pytest.mark.parametrize("memory_max", [GATEWAY_MEMORY_MIN, GIB, 8 * GIB, 100 * GIB])
def test_all_shares_together_fit_into_the_memory(memory_max: int) -> None:
    shares = GatewaySettings(redis_url="", memory_max=memory_max).bounded()

    assert shares.max_bytes_in_flight + shares.max_bytes_unread < memory_max * TIGHT_PART
    # One message may be received and decoded beyond the second mark.
    assert 2 * shares.grpc_max_input_size == 2 * shares.http_max_input_size < memory_max * (1 - FULL_PART)
    assert shares.grpc_max_concurrent_rpcs >= 500


def test_what_is_given_is_not_derived() -> None:
    settings = GatewaySettings(memory_max=GIB, max_bytes_in_flight=1, max_bytes_unread=2, grpc_max_input_size=3)
    settings = dataclasses.replace(settings, http_max_input_size=4, grpc_max_concurrent_rpcs=5)

    assert settings == settings.bounded()


def test_by_default_half_of_what_there_is_and_too_little_is_refused() -> None:
    assert max(GATEWAY_MEMORY_MIN, available_bytes() // 2) == GatewaySettings().bounded().memory_max
    with pytest.raises(click.UsageError, match="--memory-max: a gateway needs"):
        GatewaySettings(memory_max=GATEWAY_MEMORY_MIN - 1)


def test_the_process_has_some_memory() -> None:
    assert 10 << 20 < resident_bytes() < available_bytes()


def test_beyond_the_first_mark_memory_is_asked_back_and_beyond_the_second_nothing_is_taken() -> None:
    resident, asked = 0, list[int]()
    memory = MemoryBound(1000, lambda: resident)

    def relieve(excess: int) -> int:
        asked.append(excess)
        return 30

    memory.reliefs += [relieve, relieve]
    budget = ByteBudget(100, memory)

    for resident in (600, 700, 900):
        memory.look(0.0)
        assert (resident > 800) == memory.is_full
    assert [50, 20, 250, 220] == asked
    with pytest.raises(UnavailableError, match="--memory-max, 1000 bytes"):
        budget.take(1)
    resident = 0
    memory.look(0.0)
    budget.take(1)


async def test_who_waits_for_memory_goes_on_when_there_is_some() -> None:
    """As often as it is full."""
    resident = 900
    memory = MemoryBound(1000, lambda: resident)
    await memory.eased()
    for _ in range(2):
        resident = 900
        memory.look(0.0)
        waiting = asyncio.create_task(memory.eased())
        await asyncio.sleep(0)
        memory.look(0.0)
        await asyncio.sleep(0)
        assert not waiting.done()

        resident = 100
        memory.look(0.0)
        await waiting


def test_who_has_taken_nothing_for_longest_loses_its_connection_when_there_is_too_much() -> None:
    lost = list[str]()
    unread = UnreadAnswers(100)
    for client, size in (("slow", 30), ("reader", 30), ("slow", 10), ("late", 30)):
        unread.add(client, size, lambda client=client: lost.append(client))
    unread.took("reader", 10)
    assert [] == lost
    assert 90 == unread.taken

    unread.add("new", 20, lambda: lost.append("new"))
    assert ["slow"] == lost
    unread.add("new", 60, lambda: lost.append("new"))
    assert ["slow", "late"] == lost
    unread.took("slow", 30)
    unread.add("new", 500, lambda: lost.append("new"))
    assert ["slow", "late", "reader"] == lost
    unread.took("new", 580)
    assert 0 == unread.taken


def test_memory_that_is_short_is_taken_from_those_who_keep_much() -> None:
    lost = list[str]()
    unread = UnreadAnswers(1 << 40)
    for client, size in (("little", 10), ("much", MUCH_BYTES), ("more", 3 * MUCH_BYTES)):
        unread.add(client, size, lambda client=client: lost.append(client))

    assert MUCH_BYTES == unread.relieve(1)
    assert 3 * MUCH_BYTES == unread.relieve(MUCH_BYTES)
    assert ["much", "more"] == lost
    assert 0 == unread.relieve(1)


async def test_what_is_in_cycles_does_not_keep_memory_full() -> None:
    """While requests are refused, nothing else would call the collector."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

    async with nothing_stays(Circle):
        Circle()
        MemoryBound(100, lambda: 90).look(0.0)


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/v2/models/nobody/infer", "/v2/repository/index"])
async def test_a_refused_body_stays_in_no_cycle(gateway: RunningGateway, path: str) -> None:
    """Nothing of it waits for the collector: neither the call, nor the error with its frames."""
    bodies = (
        b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,1],"data":[1]}]}',
        b"{",
        b'{"ready":3}',
        b"[" * 300_000,
    )
    async with nothing_stays(InferCall, MeshError):
        for body in bodies:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
            writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode())
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
            assert b"HTTP/1.1" in await reader.read()
            writer.close()
