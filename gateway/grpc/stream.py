"""One ModelStreamInfer call: requests in the order read, answers in the same order, and nothing kept beyond that.

One reader and one writer per stream, and no task per message:

    reader   reads a message, decodes it and submits it before it reads the next one: the order in which requests
             are accepted is the order in which the client wrote them, which keeps a sequence's steps in order
    writer   takes the oldest unanswered request, waits for its future, writes; so an answer that is early waits for
             those before it, errors included (head-of-line, as Triton does for models that are not decoupled)

The writer is the call's handler; the reader is its child. A read is never cancelled: the core still writes into the
buffers of a read that its coroutine has given up. A read ends by itself when the client half-closes or leaves, and
when the call ends.

Unanswered requests are bounded, by their number and by the bytes of their tensors, and of those of answers that are
not written yet (a client that does not read them does not get more); at the bound the stream is not read,
and HTTP/2 flow control makes the client wait. The number must be well above that of the sequences which a client
interleaves on one stream: at the bound, an END that would free a slot may stand behind a START that waits for one,
until one of them times out.

A request that is refused fails by a message, and the stream goes on. So does one that was accepted and failed later,
unless the client has asked, by `triton_grpc_error`, that such a failure ends the stream with its status.

Source: triton-spec section 6, Streaming.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from gateway.bounds.unread_answers import UnreadAnswers
from gateway.grpc.arrivals import END_OF_REQUESTS
from gateway.grpc.codec import (
    NO_CLASSES,
    decode_request,
    encode_stream_answer,
    encode_stream_error,
    requested_classes,
)
from gateway.grpc.errors import SHUTTING_DOWN, abort
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import AnyMessage, InferRequest, StreamInferResponse
from gateway.requests.admission import InferCall, has_many_strings, with_strings_read
from gateway.requests.waiting import Answer
from shared.contract.errors import MeshError, ModelError, UnavailableError
from shared.process import logs

OUTSTANDING_BYTES_MAX = 256 << 20
"""Tensors of one stream's unanswered requests, and of its unwritten answers; a request that is larger by itself is let
through alone."""
ENTRY_BYTES = 2048
"""What an answer takes besides its tensors."""

Submit = Callable[[InferCall], asyncio.Future[Answer]]
Read = Callable[[], Awaitable[AnyMessage]]
StreamContext = Any
"""grpc.aio.ServicerContext[ModelInferRequest, ModelStreamInferResponse]; its methods carry no types."""


class Outstanding(msgspec.Struct):
    """A request that is not answered yet.

    answer   its answer to come, or the error that it never got beyond
    classes  its outputs that are to be classified
    size     of its tensors, and of its answer's once there is one, bytes
    unread   of its answer, as it counts until it is written, bytes
    """

    request_id: str
    model: str
    answer: asyncio.Future[Answer] | MeshError
    classes: Mapping[str, int]
    size: int
    unread: int = 0


class InferStream:
    """State of one stream, between its reader and its writer.

    read     gives the next request, or END_OF_REQUESTS (`gateway.grpc.intake`)
    unread   counts the answers until they are written; cut: closes the stream's connection
    """

    def __init__(
        self,
        context: StreamContext,
        read: Read,
        submit: Submit,
        metadata: CallMetadata,
        *,
        unread: UnreadAnswers,
        cut: Callable[[], None],
        outstanding_max: int,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
    ) -> None:
        self._context = context
        self._read = read
        self._unread = unread
        self._cut = cut
        self._submit = submit
        self._metadata = metadata
        self._outstanding_max = outstanding_max
        self._outstanding_bytes_max = outstanding_bytes_max
        self._outstanding: deque[Outstanding] = deque()
        self._outstanding_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[None] | None = None
        self._work: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._closed = False
        self._half_closed = False
        self._leaving = False
        self._stopping = False

    async def run(self) -> None:
        """Serves the stream until the client half-closes and has every answer, leaves, or the server stops.

        Ends the call with an error's status where the client asked for that (`triton_grpc_error`) and where the server
        stops. What nobody waits for any more is abandoned, and given up where it does not run yet
        (`gateway.requests.cancellation`).
        """
        self._reader = self._loop.create_task(self._read_requests(), name="grpc stream reader")
        self._reader.add_done_callback(self._reading_ended)
        try:
            await self._write_responses()
        finally:
            self._closed = True
            self._abandon()
            wake(self._room)
            if self._reader.done():
                self._reading_ended(self._reader)

    def leave(self) -> None:
        """Takes requests until there is a moment in which all of them are answered: then the call ends, with
        UNAVAILABLE unless the client had half-closed."""
        self._leaving = True
        wake(self._work)

    def stop(self) -> None:
        """Accepts nothing more; the call ends in the same way once what was accepted is answered."""
        self._stopping = True
        self.leave()
        wake(self._room)

    # -- reader -----------------------------------------------------------------------------------------------------

    async def _read_requests(self) -> None:
        read, outstanding = self._read, self._outstanding
        while not (self._closed or self._stopping):
            if len(outstanding) >= self._outstanding_max or self._outstanding_bytes >= self._outstanding_bytes_max:
                await self._wait_for_room()
                continue
            try:
                request = await read()
            except UnavailableError as full:
                self._queue("", "", full.released(), NO_CLASSES, 0)
                continue
            self._half_closed = request is END_OF_REQUESTS
            if self._half_closed or self._closed or self._stopping:
                return
            await self._accept(request)

    async def _accept(self, request: InferRequest) -> None:
        """Hands a request on and queues what will answer it. Awaits at most the reading of many strings."""
        answer: asyncio.Future[Answer] | MeshError
        classes = NO_CLASSES
        size = 0
        try:
            classes = requested_classes(request)
            call = decode_request(request, self._metadata)
            size = sum([len(tensor.raw) for tensor in call.inputs])
            if has_many_strings(call):
                call = await asyncio.to_thread(with_strings_read, call)
                if self._closed:
                    return
            answer = self._submit(call)
        except MeshError as error:
            answer = error.released()
        self._queue(request.id, request.model_name, answer, classes, size)

    def _queue(
        self,
        request_id: str,
        model: str,
        answer: asyncio.Future[Answer] | MeshError,
        classes: Mapping[str, int],
        size: int,
    ) -> None:
        outstanding = Outstanding(request_id, model, answer, classes, size)
        self._outstanding.append(outstanding)
        self._outstanding_bytes += size
        if isinstance(answer, asyncio.Future):
            if answer.done():
                self._weigh(outstanding, answer)
            else:
                answer.add_done_callback(lambda done: self._weigh(outstanding, done))
        wake(self._work)

    def _weigh(self, request: Outstanding, answer: asyncio.Future[Answer]) -> None:
        """An answer waits for those before it, and for a client that reads them: it counts until then."""
        if not answer.cancelled() and answer.exception() is None:
            size = sum([len(output.raw) for output in answer.result().message.outputs])
            request.size += size
            self._outstanding_bytes += size
            if not self._closed:
                request.unread = size + ENTRY_BYTES
                self._unread.add(self, request.unread, self._cut)

    async def _wait_for_room(self) -> None:
        self._room = self._loop.create_future()
        await self._room
        self._room = None

    def _reading_ended(self, reader: asyncio.Task[None]) -> None:
        # Once the call is over nobody asks how its last read ended; asking here keeps asyncio from reporting it.
        if self._closed and not reader.cancelled():
            reader.exception()
        wake(self._work)

    # -- writer -----------------------------------------------------------------------------------------------------

    async def _write_responses(self) -> None:
        write, outstanding, reader = self._context.write, self._outstanding, self._reader
        assert reader is not None, "the reader starts before the writer"
        while True:
            if outstanding:
                response = await self._response_to(outstanding[0])
                request = outstanding.popleft()
                self._outstanding_bytes -= request.size
                wake(self._room)
                try:
                    await write(response)
                finally:
                    self._unread.took(self, request.unread)
            elif reader.done():
                reader.result()
                break
            elif self._leaving:
                break
            else:
                await self._wait_for_work()
        if self._leaving and not self._half_closed:
            await abort(self._context, UnavailableError(SHUTTING_DOWN))

    async def _response_to(self, request: Outstanding) -> StreamInferResponse:
        error = request.answer
        if not isinstance(error, MeshError):
            try:
                # Shielded: a cancelled handler would cancel the head alone, a turn of the loop before `_abandon` takes
                # the rest. What is queued could be sent in between, and a sequence would go on without that step.
                return encode_stream_answer(await asyncio.shield(error), request.classes)
            except MeshError as failure:
                error = failure.released()
            except Exception as failure:  # noqa: BLE001  of this request alone: those behind it are other sequences' steps
                logs.error("request failed unexpectedly", failure, model=request.model)
                error = ModelError(f"internal error in the gateway: {type(failure).__name__}")
        if error.accepted and self._metadata.status_on_error:
            await abort(self._context, error)
        return encode_stream_error(error, request.request_id, request.model)

    async def _wait_for_work(self) -> None:
        self._work = self._loop.create_future()
        await self._work
        self._work = None

    def _abandon(self) -> None:
        """All in one turn of the loop: of what is queued, nothing is sent whose predecessors are given up."""
        for request in self._outstanding:
            answer = request.answer
            if isinstance(answer, asyncio.Future) and not answer.cancel() and not answer.cancelled():
                answer.exception()  # as above: nobody else will ask
            self._unread.took(self, request.unread)
        self._outstanding.clear()


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Lets the one coroutine go on that waits for this, if any does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
