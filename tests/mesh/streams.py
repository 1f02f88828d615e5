"""What comes back over a gRPC stream of `tritonclient`."""

from __future__ import annotations

import threading
from typing import Any

import tritonclient.grpc as grpc_blocking
from tritonclient.utils import InferenceServerException

from tests.mesh.running_mesh import PATIENCE_S


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
