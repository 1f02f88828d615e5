"""Clients that ask at once share what is read for them, and nobody gets what was read before they asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.models.shared_reads import SharedDocument, SharedReads
from shared.contract.errors import UnavailableError


class Counted:
    """A read that takes until the test says so. begun: the keys of reads, in their order"""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    async def __call__(self, key: str) -> str:
        self.begun.append(key)
        number = len(self.begun)
        await self.go_on.wait()
        return f"{key} {number}"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def test_who_asks_during_a_read_shares_the_next_one() -> None:
    read = Counted()
    reads = SharedReads(read)
    first = asyncio.create_task(reads.get("a"))
    await until(lambda: read.begun == ["a"])
    later = [asyncio.create_task(reads.get(key)) for key in "aaaab"]
    await asyncio.sleep(0)
    read.go_on.set()

    assert "a 1" == await first
    assert ["a 2", "a 2", "a 2", "a 2", "b 3"] == await asyncio.gather(*later)


async def test_a_read_goes_on_for_those_who_stay() -> None:
    read = Counted()
    reads = SharedReads(read)
    leaves, stays = [asyncio.create_task(reads.get("a")) for _ in range(2)]
    await until(lambda: read.begun == ["a"])
    leaves.cancel()
    await asyncio.sleep(0)
    read.go_on.set()

    assert "a 1" == await stays


async def test_a_failure_is_that_of_all_who_have_asked_and_of_nobody_later() -> None:
    times = iter((True, False))

    async def read(key: str) -> str:
        if next(times):
            raise UnavailableError("Redis is away")
        return key

    reads = SharedReads(read)
    failed = await asyncio.gather(*(reads.get("a") for _ in range(3)), return_exceptions=True)

    assert ["Redis is away"] * 3 == [str(error) for error in failed]
    assert "a" == await reads.get("a")


async def test_a_read_that_nobody_waits_for_any_more_fails_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def read(key: str) -> str:
        await go_on.wait()
        raise UnavailableError(f"{key} cannot be read")

    leaves = asyncio.create_task(SharedReads(read).get("a"))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})

    assert [] == caplog.messages


async def test_a_document_is_made_once_for_all_who_got_the_same_read() -> None:
    """A thousand who asked at once go on in one turn of the loop."""
    read, made = Counted(), list[str]()
    shared = SharedReads(read)

    def make(content: str) -> str:
        made.append(content)
        return content.upper()

    document = SharedDocument(make)

    async def asked() -> str:
        return document.of(await shared.get("a"))

    read.go_on.set()
    for number in (1, 2):
        assert {f"A {number}"} == set(await asyncio.gather(*(asked() for _ in range(1000))))
    assert ["a 1", "a 2"] == made
