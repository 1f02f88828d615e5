"""Answers of decoupled models while processes die: each client gets every answer once, in its order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio

from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually

CLIENTS = 4
VALUES = (60, 40)
"""What each step of a sequence adds: so many answers it has."""


class Reader:
    """One client with a stream of its own. model: of its sequence; got: the numbers that it was given, over all of its
    streams
    """

    def __init__(self, name: str, model: str = "streamed_sum") -> None:
        self.name = name
        self.model = model
        self.got: list[int] = []

    def step(self, index: int, *, sequence: bool, request_id: str = "", **said: Any) -> dict[str, Any]:
        made = grpc_aio.InferInput("INPUT", [1, 1], "INT32")
        made.set_data_from_numpy(np.array([[VALUES[index]]], np.int32))
        asked: dict[str, Any] = {"inputs": [made], "request_id": request_id, "parameters": said}
        if not sequence:
            return {**asked, "model_name": "streamed_count"}
        flags = {"sequence_start": index == 0, "sequence_end": index == len(VALUES) - 1}
        return {**asked, "model_name": self.model, "sequence_id": self.name, **flags}

    async def read(self, url: str, *requests: dict[str, Any]) -> None:
        """Reads all answers to the requests, which must be no errors."""

        async def each() -> AsyncIterator[dict[str, Any]]:
            for one in requests:
                yield one

        async with grpc_aio.InferenceServerClient(url) as client, asyncio.timeout(PATIENCE_S):
            responses: Any = client.stream_infer(each())
            async for result, error in responses:
                assert error is None, str(error.message())
                self.got.append(result.as_numpy("OUTPUT").item())


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
        first = reader.step(0, sequence=True, request_id="a")
        with pytest.raises(grpc.aio.AioRpcError):
            await reader.read(urls[0], first)
        had = len(reader.got)
        said = {"sequence_answer": had + 1} if tells else {}
        if not tells:
            reader.got.clear()
        again = reader.step(0, sequence=True, request_id="a", **said)
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
