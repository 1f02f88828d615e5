"""`InferenceRequest.exec` and `async_exec`: a request that a model made becomes a call, and its answer a response.
`is_model_ready` is a call, too, whose answer is whether the model is ready.

As in Triton, a call that fails is no exception but the response's error, and with `decoupled` the responses are an
iterator. Beyond Triton, that iterator may also be awaited (`async for`), which leaves the model's event loop free.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from concurrent.futures import Future
from operator import index
from typing import Any, Protocol, Self, SupportsIndex

from executor.engine.python import calls
from executor.engine.python.calls import AnswerStream, CallAnswer, CallError, ModelCall
from executor.engine.python.columns import tensor_of
from executor.engine.python.model_metrics import TritonModelException
from executor.engine.python.response import InferenceResponse, TritonError, WrongResponseError, response_parameters
from executor.engine.python.tensor import ModelTensor, datatype_of, raw_content
from executor.engine.python.texts import is_text, plain_text
from shared.contract.errors import Code
from shared.contract.ids import CorrelationId
from shared.contract.parameters import UINT64_MAX
from shared.contract.tensors import Tensor

RESERVED = frozenset({"sequence_id", "sequence_start", "sequence_end", "sequence_step", "timeout"})
"""Parameters of the protocol, which a request has fields for."""


def execute(request: MadeRequest, *, decoupled: bool) -> Any:
    """See `InferenceRequest.exec`."""
    door = calls.door()
    try:
        call = prepared(request)
    except CallError as error:
        return _failed(error, decoupled=decoupled)
    if decoupled:
        return Responses(call, door.stream(call))
    with calls.waiting_for(call):
        return response_of(door.start(call).result())


def execute_async(request: MadeRequest, *, decoupled: bool) -> Awaitable[Any]:
    """See `InferenceRequest.async_exec`."""
    loop = asyncio.get_running_loop()
    door = calls.door()
    try:
        call = prepared(request)
    except CallError as error:
        return _now(loop, _failed(error, decoupled=decoupled))
    if decoupled:
        return loop.create_task(Responses(call, door.stream(call)).begin())
    return loop.create_task(_answered(call, door.start(call)))


def is_ready(model: str, version: str) -> bool:
    """See `triton_python_backend_utils.is_model_ready`."""
    call = ModelCall(calls.next_number(), _text(model), _text(version), asks_readiness=True)
    with calls.waiting_for(call):
        answer = calls.open_door().start(call).result()
    if answer.error_code:
        raise TritonModelException(f"Failed to check model readiness: {answer.error}")
    return answer.is_ready


async def _answered(call: ModelCall, answer: Future[CallAnswer]) -> InferenceResponse:
    with calls.waiting_for(call):
        return response_of(await asyncio.wrap_future(answer))


def prepared(request: MadeRequest) -> ModelCall:
    """The call that a request makes. Raises TritonModelException for a request that no protocol can carry, and
    CallError for one that is not to be made."""
    try:
        parameters = dict(response_parameters(json.loads(request.parameters())))
    except WrongResponseError as wrong:
        raise TritonModelException(str(wrong).replace("response", "request")) from wrong
    if taken := RESERVED.intersection(parameters):
        raise TritonModelException(
            f"the parameter '{min(taken)}' of an InferenceRequest is set by its correlation_id, flags and timeout"
        )
    version = _whole(request.model_version())
    call = ModelCall(
        number=0,
        model=_text(request.model_name()),
        version="" if version < 0 else str(version),
        request_id=_text(request.request_id()),
        correlation_id=_correlation_id(request.correlation_id()),
        flags=_whole(request.flags()),
        inputs=tuple(
            Tensor(_text(tensor.name()), datatype_of(tensor), tuple(tensor.shape()), raw_content(tensor))
            for tensor in request.inputs()
        ),
        outputs=tuple(sorted(map(_text, request.requested_output_names()))),
        timeout_us=_whole(request.timeout()),
        parameters=parameters,
    )
    return calls.complete(call, request.trace())


def _text(given: object) -> str:
    """What the model gave as a name. Raises TritonModelException for what is no text."""
    if not is_text(given):
        raise TritonModelException(f"names, versions and ids are strings, not {given!r}")
    return plain_text(given)


def _whole(given: SupportsIndex) -> int:
    """What the model gave as a whole number, as Python's own type: not a bool, nor another subclass."""
    return int(index(given))


def _correlation_id(given: object) -> CorrelationId:
    """What the model gave, as Python's own type: it may be an element of a CORRID control's array."""
    if isinstance(given, str):
        return plain_text(given)
    if isinstance(given, SupportsIndex) and 0 <= index(given) <= UINT64_MAX:
        return _whole(given)
    raise TritonModelException(f"a correlation id is a str or a uint64, not {given!r}")


def response_of(answer: CallAnswer) -> InferenceResponse:
    if answer.error_code:
        code = Code.UNAVAILABLE if answer.error_code == Code.RESOURCE_EXHAUSTED.value else answer.error_code
        return InferenceResponse(error=TritonError(answer.error, code))
    return InferenceResponse(
        [tensor_of(output.name, output) for output in answer.outputs], parameters=answer.parameters
    )


class MadeRequest(Protocol):
    """What a call takes of an `InferenceRequest`."""

    def request_id(self) -> str: ...
    def correlation_id(self) -> int | str: ...
    def flags(self) -> int: ...
    def inputs(self) -> list[ModelTensor]: ...
    def requested_output_names(self) -> set[str]: ...
    def model_name(self) -> str: ...
    def model_version(self) -> int: ...
    def timeout(self) -> int: ...
    def parameters(self) -> str: ...
    def trace(self) -> object: ...


class Responses:
    """The responses to a call with `decoupled`: an iterator, and an asynchronous one.

    As in Triton, a response without tensors may be the last one. A loop goes on where the last one stopped; behind the
    last response it begins again.
    """

    def __init__(self, call: ModelCall, stream: AnswerStream) -> None:
        self._call = call
        self._stream = stream
        self._seen: list[InferenceResponse] = []
        self._at = 0
        self._ended = False
        self._is_cancelled = False

    async def begin(self) -> Self:
        """Waits for the first response, as `async_exec` does in Triton. A loop that waits for it without `await` would
        hold up the other requests of a model that is asynchronous.
        """
        async for _ in self:
            break
        self._at = 0
        return self

    def __iter__(self) -> Self:
        if self._ended and self._at == len(self._seen):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._at == len(self._seen):
            if self._ended:
                raise StopIteration
            with calls.waiting_for(self._call):
                answer = self._stream.read().result()
            if not self._took(answer):
                raise StopIteration
        self._at += 1
        return self._seen[self._at - 1]

    def __aiter__(self) -> Self:
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        if self._at == len(self._seen):
            if self._ended:
                raise StopAsyncIteration
            with calls.waiting_for(self._call):
                answer = await asyncio.wrap_future(self._stream.read())
            if not self._took(answer):
                raise StopAsyncIteration
        self._at += 1
        return self._seen[self._at - 1]

    def cancel(self) -> None:
        """The responses that have not come are not wanted any more.

        In their place comes an error, as from those of Triton's models that ask whether they are cancelled.
        """
        self._is_cancelled = True
        self._stream.cancel()

    def __del__(self) -> None:
        if not self._ended:
            self._stream.cancel()

    def _took(self, answer: CallAnswer | None) -> bool:
        if answer is None:
            self._ended = True
            if not self._is_cancelled:
                return False
            answer = CallAnswer(error_code=Code.CANCELLED, error="the call was cancelled")
        self._seen.append(response_of(answer))
        return True


def _failed(error: CallError, *, decoupled: bool) -> Any:
    response = InferenceResponse(error=TritonError(error.message, error.code))
    return iter([response]) if decoupled else response


def _now(loop: asyncio.AbstractEventLoop, value: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = loop.create_future()
    future.set_result(value)
    return future
