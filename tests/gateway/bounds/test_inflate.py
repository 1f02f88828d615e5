"""Compressed bodies are unpacked to exactly what they hold, or refused."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
from collections.abc import Iterator

import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.inflate import EITHER_WINDOW, PIECE_BYTES, STEP_BYTES, gathered, inflated
from shared.contract.errors import MeshError, RequestError

SIZE_MAX = 4 * PIECE_BYTES


def too_large(size: int) -> MeshError:
    return RequestError(f"{size} bytes")


async def joined(data: bytes) -> bytes:
    with ByteBudget(2 * SIZE_MAX).reserve() as reservation:
        return await gathered(inflated(data, EITHER_WINDOW, SIZE_MAX, too_large), len(data), reservation)


@pytest.mark.parametrize("size", [0, 1, 1 << 16, PIECE_BYTES, PIECE_BYTES + 1, SIZE_MAX])
async def test_what_was_packed_comes_out(size: int) -> None:
    data = random.Random(size).randbytes(size)

    assert data == await joined(gzip.compress(data, 1))


@pytest.mark.parametrize("size", [5, 1 << 16, 2 * PIECE_BYTES])
async def test_nothing_behind_the_end_is_dropped_silently(size: int) -> None:
    packed = gzip.compress(random.Random(size).randbytes(size), 1)

    for behind in (b"x", gzip.compress(b"a second member"), b"\0" * (1 << 17)):
        with pytest.raises(RequestError, match="goes on behind the compressed data's end"):
            await joined(packed + behind)
    with pytest.raises(RequestError, match="ends in the middle"):
        await joined(packed[:-1])


@pytest.mark.parametrize("packed_bytes", [STEP_BYTES, STEP_BYTES + 1])
async def test_only_a_little_is_unpacked_on_the_event_loop(packed_bytes: int) -> None:
    threads = list[int]()

    def pieces() -> Iterator[bytes]:
        for size in (PIECE_BYTES, 0):
            threads.append(threading.get_ident())
            yield bytes(size)

    with ByteBudget(SIZE_MAX).reserve() as reservation:
        await gathered(pieces(), packed_bytes, reservation)

    assert [packed_bytes <= STEP_BYTES, False] == [thread == threading.get_ident() for thread in threads]


async def test_what_is_unpacked_for_nobody_counts_until_its_thread_has_ended() -> None:
    """Otherwise a client that leaves again and again has many at work, and nobody knows of the memory."""
    budget, works, may_end = ByteBudget(SIZE_MAX), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def pieces() -> Iterator[bytes]:
        loop.call_soon_threadsafe(works.set)
        assert may_end.wait(60)
        yield b""

    async def received() -> None:
        with budget.reserve() as reservation:
            reservation.hold(STEP_BYTES + 1)
            await gathered(pieces(), STEP_BYTES + 1, reservation)

    left = asyncio.create_task(received())
    await works.wait()
    left.cancel()
    await asyncio.wait([left], timeout=0.1)
    counted = budget.taken
    may_end.set()
    await asyncio.wait([left])

    assert left.cancelled()
    assert (STEP_BYTES + 1, 0) == (counted, budget.taken)
