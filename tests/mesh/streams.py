"""What comes back over a gRPC stream of `tritonclient`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_blocking
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from tests.mesh.running_mesh import PATIENCE_S

VALUES = (60, 40)
"""What each step of a `Reader` adds: so many answers it has."""


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

    async def read(self, url: str, *requests: dict[str, Any], stays: bool = False) -> None:
        """Reads all answers to the requests, which must be no errors. stays: the client does not end the stream"""

        async def each() -> AsyncIterator[dict[str, Any]]:
            for one in requests:
                yield one
            if stays:
                await asyncio.sleep(PATIENCE_S)

        async with grpc_aio.InferenceServerClient(url) as client, asyncio.timeout(PATIENCE_S):
            responses: Any = client.stream_infer(each())
            async for result, error in responses:
                assert error is None, str(error.message())
                self.got.append(result.as_numpy("OUTPUT").item())

    async def lose(self, url: str, *, tells: bool) -> dict[str, Any]:
        """Asks for the first step at a gateway that is killed meanwhile; what is to be asked of another one then.

        tells  it names the first answer that it lacks; else, or if it has all of them already, it wants all once more
        """
        with pytest.raises(grpc.aio.AioRpcError):
            await self.read(url, self.step(0, sequence=True, request_id="a"), stays=True)
        had = len(self.got)
        if tells and had < VALUES[0]:
            return self.step(0, sequence=True, request_id="a", sequence_answer=had + 1)
        self.got.clear()
        return self.step(0, sequence=True, request_id="a")


class Got(list[tuple[str, Any]]):
    """The answers of a stream in their order: id, and what came: a number, the text of an error, or None for an empty
    final response.
    """

    def __init__(self) -> None:
        self.finals: list[bool | None] = []

    def of(self, name: str) -> list[Any]:
        return [content for id, content in self if id == name]

    def add(self, result: Any, error: InferenceServerException | None) -> None:
        # Of an error the library gives the text alone.
        message = None if result is None else result.get_response()
        self.finals.append(message.parameters["triton_final_response"].bool_param if message is not None else None)
        if error is not None:
            self.append(("", str(error.message())))
        else:
            assert message is not None
            assert result is not None
            self.append((message.id, result.as_numpy("OUTPUT").item() if message.outputs else None))


def with_empty_finals(url: str, request: dict[str, Any]) -> Got:
    """The answers to a request that wants empty final responses: only the blocking client can say so."""
    got = Got()
    last = threading.Event()

    def take(result: Any, error: InferenceServerException | None) -> None:
        got.add(result, error)
        if got.finals[-1]:
            last.set()

    with grpc_blocking.InferenceServerClient(url) as client:
        client.start_stream(take)
        client.async_stream_infer(**request, enable_empty_final_response=True)
        assert last.wait(PATIENCE_S)
        client.stop_stream()
    return got
