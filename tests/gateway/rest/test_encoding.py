"""Answers that come at one moment are written in turns of the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.rest import encoding as encodings
from gateway.rest import response
from gateway.rest.body import BULKY_BYTES
from gateway.rest.encoding import SMALL_BYTES, Encoding, packed
from shared.contract.tensors import Tensor
from tests.gateway.one_at_a_time import one_at_a_time

SCOPE = {"client": ("127.0.0.1", 1)}
TENSOR = Tensor("T", "INT8", (1,), b"1")


async def written(sizes: list[int]) -> list[list[int]]:
    """The sizes of the answers that are written in each turn of the loop, all of which come at one moment."""
    encoding, turns = Encoding(), [list[int]()]

    def write(size: int) -> None:
        turns[-1].append(size)

    async with asyncio.TaskGroup() as tasks:
        for size in sizes:
            tasks.create_task(encoding.of(SCOPE, size, lambda size=size: write(size)))
        while sum(map(len, turns)) < len(sizes):
            await asyncio.sleep(0)
            turns.append([])
    return [turn for turn in turns if turn]


async def test_answers_take_turns_and_small_ones_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    turns = await written([BULKY_BYTES] * 20 + [SMALL_BYTES] * 20)

    assert [BULKY_BYTES, *[SMALL_BYTES] * 20] == turns[0]
    assert [[BULKY_BYTES]] * 19 == turns[1:]


async def test_large_answers_are_written_in_a_thread_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding()
    with one_at_a_time(monkeypatch, response, "json_of_tensor") as threads:
        sizes = [BULKY_BYTES + 1] * 8
        await asyncio.gather(*(encoding.of(SCOPE, size, lambda: response.json_of_tensor(TENSOR)) for size in sizes))

    assert threading.get_ident() not in threads
    assert threading.get_ident() == await encoding.of(SCOPE, BULKY_BYTES, threading.get_ident)


async def test_only_answers_that_take_long_are_packed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def pack(content: bytes, encoding: str) -> bytes:
        threads.append(threading.current_thread() is not threading.main_thread())
        return content[:1] + encoding.encode()

    monkeypatch.setattr(encodings, "pack", pack)

    assert [b"xgzip", b"xgzip"] == [await packed(b"x" * size, "gzip") for size in (SMALL_BYTES, SMALL_BYTES + 1)]
    assert [False, True] == threads
