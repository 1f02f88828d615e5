"""Calls of a target by tritonclient's asyncio libraries: over HTTP, over gRPC, and on one gRPC stream in order.

A call gives an `Answer` or raises `Refused`, which reads the same for both protocols.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from numpy.typing import NDArray
from tritonclient import utils as client_utils
from tritonclient.utils import InferenceServerException

from gateway.requests.status import GRPC_STATUS, HTTP_STATUS
from shared.contract.errors import Code
from shared.contract.ids import CorrelationId, sequence_id
from shared.store.keyspace import Keyspace
from tests.conformance.targets import Target
from tests.mesh.running_mesh import PATIENCE_S, eventually

Array = NDArray[Any]
_numbers = itertools.count(1001)


def fresh_id() -> int:
    """A correlation id that no other test of this run uses."""
    return next(_numbers)


def fresh_text() -> str:
    """A string id that no other test of this run uses."""
    return f"sequence \u00e9{next(_numbers)}"


def neighbours(model: str, count: int, *, version: str = "", text: bool = False) -> list[CorrelationId]:
    """Fresh ids of sequences that a mesh keeps in the same shard.

    What is sent to such sequences on one stream is accepted in the order sent, whichever of them it is for; between
    sequences of different shards a mesh promises no order.
    """
    keys = Keyspace()
    ids: list[CorrelationId] = []
    while len(ids) < count:
        one = fresh_text() if text else fresh_id()
        if not ids or shard(keys, model, version, one) == shard(keys, model, version, ids[0]):
            ids.append(one)
    return ids


def shard(keys: Keyspace, model: str, version: str, identity: CorrelationId) -> int:
    """Where a mesh keeps a sequence."""
    return keys.shard_of(sequence_id(model, version, identity))


def triton_dtype(array: Array) -> str:
    """The protocol's name of an array's type."""
    return str(cast("Any", client_utils).np_to_triton_dtype(array.dtype))


@dataclass(frozen=True)
class Step:
    """One request. Without a model or inputs of its own: one number as INPUT, to the model of its caller.

    value       goes into INPUT as INT32, shape [1, 1] (a sequence of numbers: [1, n]), unless `inputs` are given
    parameters  further request parameters
    """

    id: CorrelationId = 0
    value: int | tuple[int, ...] = 1
    start: bool = False
    end: bool = False
    model: str = ""
    version: str = ""
    request_id: str = ""
    inputs: Mapping[str, Array] | None = None
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, str | int | bool] | None = None
    priority: int = 0
    timeout_us: int | None = None

    def tensors(self) -> Mapping[str, Array]:
        """The inputs."""
        if self.inputs is not None:
            return self.inputs
        values = (self.value,) if isinstance(self.value, int) else self.value
        return {"INPUT": np.array([values], np.int32)}

    def arguments(self, library: Any) -> dict[str, Any]:
        """The arguments of `infer` of either library."""
        inputs: list[Any] = []
        for name, array in self.tensors().items():
            tensor = library.InferInput(name, list(array.shape), triton_dtype(array))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        outputs = None if self.outputs is None else [library.InferRequestedOutput(name) for name in self.outputs]
        return {
            "model_name": self.model,
            "inputs": inputs,
            "model_version": self.version,
            "outputs": outputs,
            "request_id": self.request_id,
            "sequence_id": self.id,
            "sequence_start": self.start,
            "sequence_end": self.end,
            "priority": self.priority,
            "timeout": self.timeout_us,
            "parameters": dict(self.parameters) if self.parameters else None,
        }


@dataclass(frozen=True)
class Row:
    """One request of a call of `execute`, as the recorder saw it."""

    document: Mapping[str, Any]

    @property
    def request_id(self) -> str:
        """The request's own id."""
        return self.document["request_id"]

    @property
    def correlation_id(self) -> CorrelationId:
        """What the model was told by the request, 0 for a null row."""
        return self.document["correlation_id"]

    @property
    def tensors(self) -> Mapping[str, Any]:
        """{name: {"shape", "data"}} of every input, control and state."""
        return self.document["tensors"]

    def flat(self, name: str) -> list[Any]:
        """The elements of a tensor."""
        return np.array(self.tensors[name]["data"], dtype=object).reshape(-1).tolist()

    def value(self, name: str = "INPUT") -> Any:
        """The only element of a tensor."""
        (value,) = self.flat(name)
        return value


@dataclass(frozen=True)
class Seen:
    """One call of `execute`: which instance, its how-manieth call (from 1), which row the answered request was."""

    instance: str
    call: int
    row: int
    rows: list[Row]

    @property
    def mine(self) -> Row:
        """The answered request."""
        return self.rows[self.row]

    def values(self, name: str = "INPUT") -> list[Any]:
        """The only element of a tensor, of every row."""
        return [row.value(name) for row in self.rows]


@dataclass(frozen=True)
class Answer:
    """What a call gave. parameters: of the response."""

    outputs: Mapping[str, Array]
    model: str
    version: str
    request_id: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def total(self) -> int:
        """The only element of OUTPUT."""
        return int(self.outputs["OUTPUT"].item())

    @property
    def seen(self) -> Seen:
        """The recorder's call."""
        document = json.loads(self.outputs["SEEN"].item())
        rows = [Row(row) for row in document["rows"]]
        return Seen(document["instance"], document["call"], document["row"], rows)


class Refused(Exception):
    """A call failed.

    status   as the protocol says it: "400", "StatusCode.INVALID_ARGUMENT"; "" inside a stream, which has none
    message  the error's text
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.message = message

    @classmethod
    def of(cls, error: InferenceServerException) -> Refused:
        """tritonclient's error, whose status may be None."""
        untyped: Any = error
        return cls(untyped.status() or "", untyped.message() or "")

    def is_code(self, code: Code) -> bool:
        """Whether the status is that of a Triton code (HTTP has one status for several of them)."""
        return self.status in (f"{HTTP_STATUS[code]}", f"StatusCode.{GRPC_STATUS[code]}", "")


@contextmanager
def refused(code: Code, *texts: str) -> Generator[None]:
    """Expects a call inside to be refused with that code and every text in its message (the first at its beginning)."""
    with pytest.raises(Refused) as caught:
        yield
    error = caught.value
    assert error.is_code(code), f"expected {code}, got {error}"
    assert not texts or error.message.startswith(texts[0]), f"expected {texts[0]!r}, got {error}"
    assert all(text in error.message for text in texts), f"expected {texts}, got {error}"


class Caller:
    """Unary calls over one protocol. An async context manager.

    protocol  "http" or "grpc"
    """

    def __init__(self, protocol: str, target: Target, model: str = "") -> None:
        self.protocol = protocol
        self.target = target
        self.model = model
        self.library: Any = http_aio if protocol == "http" else grpc_aio
        # tritonclient's default of 100 connections at a time would hold back a test of many callers.
        many = {"conn_limit": 1000} if protocol == "http" else {}
        self.client: Any = self.library.InferenceServerClient(getattr(target, protocol), **many)

    def __repr__(self) -> str:
        return f"Caller({self.protocol})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()

    def of(self, model: str) -> Caller:
        """The same connection, for another model."""
        other = object.__new__(Caller)
        other.__dict__ = {**self.__dict__, "model": model}
        return other

    async def infer(self, step: Step) -> Answer:
        """One request; raises Refused."""
        step = replace(step, model=step.model or self.model)
        try:
            result = await self.client.infer(**step.arguments(self.library))
        except InferenceServerException as error:
            raise Refused.of(error) from None
        return answer_of(result)

    async def __call__(self, identity: CorrelationId, value: int, *, start: bool = False, end: bool = False) -> Answer:
        """A step of a sequence with one number."""
        return await self.infer(Step(identity, value, start=start, end=end))

    def begin(self, step: Step) -> asyncio.Task[Answer]:
        """Sends a request without waiting. Nothing is promised of the order of several such calls."""
        return asyncio.create_task(self.infer(step))

    async def statistics(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        """The statistics of one model version as JSON; gRPC's 64 bit numbers are read as numbers."""
        return (await self.all_statistics(model or self.model, version))[0]

    async def all_statistics(self, model: str = "", version: str = "") -> list[Mapping[str, Any]]:
        """The statistics of all matching model versions."""
        try:
            if self.protocol == "http":
                document = await self.client.get_inference_statistics(model, version)
            else:
                document = await self.client.get_inference_statistics(model, version, as_json=True)
        except InferenceServerException as error:
            raise Refused.of(error) from None
        return [cast("Mapping[str, Any]", as_numbers(one)) for one in document["model_stats"]]


def count(statistics: Mapping[str, Any], name: str) -> int:
    """How often, by a model's statistics: gRPC's JSON leaves out what is 0."""
    return statistics["inference_stats"].get(name, {}).get("count", 0)


async def settled(caller: Caller, answered: int) -> Mapping[str, Any]:
    """The statistics when so many requests are in them: Triton's may lag the responses."""
    while True:
        statistics = await caller.statistics()
        if count(statistics, "success") + count(statistics, "fail") >= answered:
            return statistics
        await asyncio.sleep(0.01)


def as_numbers(document: Any) -> Any:
    """A document with its texts of digits (but those under `version`) as numbers."""
    if isinstance(document, dict):
        entries = cast("dict[str, Any]", document).items()
        return {key: value if key in ("name", "version") else as_numbers(value) for key, value in entries}
    if isinstance(document, list):
        return [as_numbers(value) for value in cast("list[Any]", document)]
    return int(document) if isinstance(document, str) and document.isdigit() else document


def answer_of(result: Any) -> Answer:
    """tritonclient's result of either protocol."""
    response: Any = result.get_response()
    if isinstance(response, dict):
        document = cast("dict[str, Any]", response)
        names = [output["name"] for output in document.get("outputs", [])]
        outputs = {name: result.as_numpy(name) for name in names}
        parameters = document.get("parameters", {})
        return Answer(outputs, document["model_name"], document["model_version"], document.get("id", ""), parameters)
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
    }
    return Answer(outputs, response.model_name, response.model_version, response.id, parameters)


class Stream:
    """One gRPC stream. An async context manager; leaving it half-closes and reads the rest.

    Requests are accepted in the order of `send`, whatever they are for; answers come in the same order.
    """

    def __init__(self, target: Target, model: str = "", *, headers: Mapping[str, str] | None = None) -> None:
        self.model = model
        self._client: Any = grpc_aio.InferenceServerClient(target.grpc)
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._responses: Any = None
        self._headers = dict(headers or {})
        self._closed = False

    async def __aenter__(self) -> Self:
        self._responses = self._client.stream_infer(self._written(), headers=self._headers)
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.half_close()
            async for _ in self.rest():
                pass
        else:
            self.cancel()
        await self._client.close()

    async def _written(self) -> AsyncIterator[dict[str, Any]]:
        while (request := await self._requests.get()) is not None:
            yield request

    def send(self, *steps: Step) -> None:
        """Puts requests on their way, in order."""
        for step in steps:
            whole = replace(step, model=step.model or self.model)
            self._requests.put_nowait(whole.arguments(grpc_aio))

    def half_close(self) -> None:
        """Says that no request follows."""
        if not self._closed:
            self._closed = True
            self._requests.put_nowait(None)

    def cancel(self) -> None:
        """Ends the call at once."""
        self._responses.cancel()

    async def receive(self) -> Answer:
        """The next answer; raises Refused for an error, be it one request's (no status) or the whole stream's."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                result, error = await anext(self._responses)
        except grpc_aio.grpc.aio.AioRpcError as error:
            raise Refused(str(error.code()), error.details() or "") from None
        if error is not None:
            raise Refused.of(error)
        return answer_of(result)

    async def answers(self, count: int) -> list[Answer]:
        """So many answers."""
        return [await self.receive() for _ in range(count)]

    async def rest(self) -> AsyncIterator[Answer | Refused]:
        """All that is still to come, to the end of the call."""
        while True:
            try:
                yield await self.receive()
            except StopAsyncIteration:
                return
            except Refused as error:
                yield error
                if error.status:
                    return


class Gate:
    """Holds a call of the recorder's `execute` until `open`: what comes meanwhile gathers and shares a batch.

    gate = Gate(tmp_path)
    held = caller.begin(Step(1, start=True, parameters=gate.parameters))
    await gate.entered()
    ...
    gate.open()
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"gate{next(_numbers)}"
        self._path.touch()

    @property
    def parameters(self) -> dict[str, str | int | bool]:
        """Parameters of the request whose call is to be held."""
        return {"hold": str(self._path)}

    @property
    def is_entered(self) -> bool:
        """Whether the call has begun."""
        return Path(f"{self._path}.entered").exists()

    async def entered(self) -> None:
        """Returns when the call has begun."""
        await eventually(lambda: self.is_entered, "the held call has begun")

    def open(self) -> None:
        """Lets the call go on."""
        self._path.unlink(missing_ok=True)
