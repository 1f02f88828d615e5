"""Answers of decoupled models while processes die: each client gets every answer once, in its order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.streams import VALUES, Reader

CLIENTS = 4


@pytest.mark.parametrize("sequence", [True, False])
async def test_every_answer_comes_once_though_the_executors_are_killed_in_the_middle_of_them(
    victim: RunningMesh, *, sequence: bool
) -> None:
    readers = [Reader(f"watched {number}") for number in range(CLIENTS)]
    url = victim.grpc()
    async with asyncio.TaskGroup() as group:
        for reader in readers:
            steps = [reader.step(index, sequence=sequence) for index in range(len(VALUES) if sequence else 1)]
            group.create_task(reader.read(url, *steps))
        await eventually(lambda: all(len(reader.got) > 20 for reader in readers), "answers come")
        for name in victim.names("executor"):
            victim.kill(name)

    expected = list(range(1, (sum(VALUES) if sequence else VALUES[0]) + 1))
    for reader in readers:
        assert expected == reader.got


async def test_a_retry_at_another_gateway_goes_on_behind_the_answers_that_the_client_has(
    victim: RunningMesh,
) -> None:
    """Half of the clients say which answer they lack first; the others get all of the step's answers again. The
    executor dies too.
    """
    readers = [Reader(f"retried {number}") for number in range(CLIENTS)]
    urls = [victim.grpc(0), victim.grpc(1)]

    async def play(reader: Reader, *, tells: bool) -> None:
        again = await reader.lose(urls[0], tells=tells)
        await reader.read(urls[1], again, reader.step(1, sequence=True, request_id="b"))

    async with asyncio.TaskGroup() as group:
        for reader, tells in zip(readers, itertools.cycle((True, False)), strict=False):
            group.create_task(play(reader, tells=tells))
        await eventually(lambda: all(len(reader.got) > 20 for reader in readers), "answers come")
        victim.kill(victim.gateways[0].name)
        victim.kill(victim.names("executor")[0])

    for reader in readers:
        assert list(range(1, sum(VALUES) + 1)) == reader.got


async def test_a_step_that_is_over_gives_its_answers_again(victim: RunningMesh) -> None:
    reader, late, later = Reader("over"), Reader("over"), Reader("over")
    await reader.read(victim.grpc(0), reader.step(0, sequence=True, request_id="a"))

    await late.read(victim.grpc(1), late.step(0, sequence=True, request_id="a"))
    await later.read(victim.grpc(1), later.step(0, sequence=True, request_id="a", sequence_answer=50))
    await reader.read(victim.grpc(0), reader.step(1, sequence=True, request_id="b"))

    assert list(range(1, VALUES[0] + 1)) == late.got
    assert list(range(50, VALUES[0] + 1)) == later.got
    assert list(range(1, sum(VALUES) + 1)) == reader.got
