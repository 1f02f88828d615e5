"""One ModelStreamInfer call: answers its requests in the order in which they came.

One reader and one writer per stream, and no task per message:

    reader   reads a message, decodes it and submits it before it reads the next one. So requests are accepted in the
             order in which the client wrote them, which keeps a sequence's steps in order
    writer   takes the oldest unanswered request, waits for its answer or error, and writes it. An answer that comes
             early waits for those before it (head-of-line, as Triton does for models that are not decoupled)

The writer runs in the call's handler, the reader in a task that the handler starts. A read is never cancelled: gRPC's
core would still write into the buffers of the cancelled read. A read ends by itself when the client half-closes or
leaves, and when the call ends.

Unanswered requests are bounded by their number, and by the bytes of their tensors and of answers that are not written
yet. At the bound the stream is not read, and HTTP/2 flow control makes the client wait. The number must be well above
that of the sequences that a client interleaves on one stream. Otherwise an END that would free a slot may wait, unread,
behind a START that waits for that slot, until one of them times out.

A refused request fails by a message, and the stream goes on. So does a request that was accepted and failed later,
unless the client has asked, by `triton_grpc_error`, that such a failure ends the stream with its status.

Source: triton-spec section 6, Streaming.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from gateway.bounds.unread_answers import UnreadAnswers
from gateway.grpc.arrivals import END_OF_REQUESTS
from gateway.grpc.codec import (
    RAW_OUTPUTS,
    OutputForms,
    decode_request,
    encode_stream_answer,
    encode_stream_error,
    requested_forms,
)
from gateway.grpc.errors import SHUTTING_DOWN, abort
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import AnyMessage, Context, InferRequest, StreamInferResponse
from gateway.requests.admission import InferCall, has_many_strings, with_strings_read
from gateway.requests.regions import NO_REGIONS, Regions
from gateway.requests.waiting import Answer
from shared.contract.errors import MeshError, ModelError, UnavailableError
from shared.process import logs

OUTSTANDING_BYTES_MAX = 256 << 20
"""Tensors of one stream's unanswered requests and unwritten answers. A single request may be larger: the bound is
checked before a request is read."""
BULKY_BYTES = 1 << 18
"""Answers that are classified or written into shared memory beyond this size are encoded in a thread."""
ENTRY_BYTES = 2048
"""Memory of an answer besides its tensors."""

Submit = Callable[[InferCall], asyncio.Future[Answer]]
Read = Callable[[], Awaitable[AnyMessage]]


class Outstanding(msgspec.Struct):
    """A request that is not answered yet.

    answer   future of its answer; or the error that it was refused with
    forms    outputs that the client wants otherwise than raw
    size     bytes of its tensors, plus those of its answer once it is there
    is_answered  its answer or error is there, and counted in `size`
    unread   bytes of its answer that count as unread until it is written
    """

    request_id: str
    model: str
    answer: asyncio.Future[Answer] | MeshError
    forms: OutputForms
    size: int
    is_answered: bool = False
    unread: int = 0


class InferStream:
    """The state of one stream, shared by its reader and its writer.

    read    gives the next request, or END_OF_REQUESTS (`gateway.grpc.intake`)
    unread  counts the answers until they are written
    cut     closes the stream's connection
    """

    def __init__(
        self,
        context: Context,
        read: Read,
        submit: Submit,
        metadata: CallMetadata,
        *,
        unread: UnreadAnswers,
        cut: Callable[[], None],
        outstanding_max: int,
        regions: Regions = NO_REGIONS,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
    ) -> None:
        self._context = context
        self._read = read
        self._unread = unread
        self._cut = cut
        self._submit = submit
        self._metadata = metadata
        self._outstanding_max = outstanding_max
        self._regions = regions
        self._outstanding_bytes_max = outstanding_bytes_max
        self._outstanding: deque[Outstanding] = deque()
        self._outstanding_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._half_closed = False
        self._leaving = False
        self._stopping = False

    async def run(self) -> None:
        """Serves the stream until the client half-closes and has every answer, the client leaves, or the server stops.

        Ends the call with an error's status if the client asked for that (`triton_grpc_error`), and when the server
        stops. Requests that are then unanswered are cancelled (`gateway.requests.cancellation`).
        """
        self._reader = self._loop.create_task(self._read_requests(), name="grpc stream reader")
        self._reader.add_done_callback(self._reading_ended)
        try:
            await self._write_responses()
        finally:
            # Set first, so that the reader submits nothing more.
            self._closed = True
            self._abandon()
            self._room.set()
            if self._reader.done():
                self._reading_ended(self._reader)

    def leave(self) -> None:
        """Ends the call as soon as every request that was read is answered; until then it goes on taking requests.

        The status is UNAVAILABLE, unless the client had half-closed.
        """
        self._leaving = True
        self._work.set()

    def stop(self) -> None:
        """Takes no further request. The call ends as after `leave`."""
        self._stopping = True
        self.leave()
        self._room.set()

    # -- reader -----------------------------------------------------------------------------------------------------

    async def _read_requests(self) -> None:
        read, outstanding = self._read, self._outstanding
        while not (self._closed or self._stopping):
            if len(outstanding) >= self._outstanding_max or self._outstanding_bytes >= self._outstanding_bytes_max:
                self._room.clear()
                await self._room.wait()
                continue
            try:
                request = await read()
            except UnavailableError as full:
                # No room for this message: it is answered with an error in its turn, and the stream goes on. Any other
                # error, such as a malformed message, ends the reader and with it the call.
                self._queue(Outstanding("", "", full.released(), RAW_OUTPUTS, 0))
                continue
            self._half_closed = request is END_OF_REQUESTS
            if self._half_closed or self._closed or self._stopping:
                return
            await self._accept(request)

    async def _accept(self, request: InferRequest) -> None:
        """Submits a request and queues its answer to come. Awaits nothing but the reading of many strings."""
        answer: asyncio.Future[Answer] | MeshError
        forms = RAW_OUTPUTS
        size = 0
        try:
            forms = requested_forms(request, self._regions)
            call = decode_request(request, self._metadata, self._regions)
            size = sum([len(tensor.raw) for tensor in call.inputs])
            if has_many_strings(call):
                call = await asyncio.to_thread(with_strings_read, call)
                if self._closed:
                    return
            answer = self._submit(call)
        except MeshError as error:
            answer = error.released()
        self._queue(Outstanding(request.id, request.model_name, answer, forms, size))

    def _queue(self, outstanding: Outstanding) -> None:
        self._outstanding.append(outstanding)
        self._outstanding_bytes += outstanding.size
        answer = outstanding.answer
        if isinstance(answer, MeshError):
            outstanding.is_answered = True
            self._work.set()
        elif answer.done():
            self._answered(outstanding, answer)
        else:
            answer.add_done_callback(lambda done: self._answered(outstanding, done))

    def _answered(self, request: Outstanding, answer: asyncio.Future[Answer]) -> None:
        """Counts an answer that has come until it is written: it waits for earlier ones, and for the client to read."""
        if self._closed:
            return
        request.is_answered = True
        if answer.exception() is None:
            size = sum([len(output.raw) for output in answer.result().message.outputs])
            request.size += size
            self._outstanding_bytes += size
            request.unread = size + ENTRY_BYTES
            self._unread.add(self, request.unread, self._cut)
        if self._outstanding[0] is request:
            self._work.set()

    def _reading_ended(self, reader: asyncio.Task[None]) -> None:
        # After the call's end nothing retrieves the reader's exception. Retrieved here, asyncio does not log it.
        if self._closed and not reader.cancelled():
            reader.exception()
        self._work.set()

    # -- writer -----------------------------------------------------------------------------------------------------

    async def _write_responses(self) -> None:
        write, outstanding, reader = self._context.write, self._outstanding, self._reader
        assert reader is not None, "the reader starts before the writer"
        while True:
            request = outstanding[0] if outstanding else None
            if request is not None and request.is_answered:
                response = await self._response_to(request)
                outstanding.popleft()
                self._outstanding_bytes -= request.size
                self._room.set()
                try:
                    await write(response)
                finally:
                    self._unread.took(self, request.unread)
            elif request is None and reader.done():
                reader.result()
                break
            elif request is None and self._leaving:
                break
            else:
                self._work.clear()
                await self._work.wait()
        if self._leaving and not self._half_closed:
            await abort(self._context, UnavailableError(SHUTTING_DOWN))

    async def _response_to(self, request: Outstanding) -> StreamInferResponse:
        error = request.answer
        if not isinstance(error, MeshError):
            try:
                if request.forms and request.size > BULKY_BYTES:
                    return await asyncio.to_thread(encode_stream_answer, error.result(), request.forms)
                return encode_stream_answer(error.result(), request.forms)
            except MeshError as failure:
                error = failure.released()
            except Exception as failure:  # noqa: BLE001  of this request alone: those behind it are other sequences' steps
                logs.error("request failed unexpectedly", failure, model=request.model)
                error = ModelError(f"internal error in the gateway: {type(failure).__name__}")
        if error.accepted and self._metadata.status_on_error:
            await abort(self._context, error)
        return encode_stream_error(error, request.request_id, request.model)

    def _abandon(self) -> None:
        """Cancels all unanswered requests in one turn of the loop, so that no step is sent whose predecessor is
        cancelled."""
        for request in self._outstanding:
            answer = request.answer
            if isinstance(answer, asyncio.Future) and not answer.cancel() and not answer.cancelled():
                # Retrieved, so that asyncio does not log it.
                answer.exception()
            self._unread.took(self, request.unread)
        self._outstanding.clear()
