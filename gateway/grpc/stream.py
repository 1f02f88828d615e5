"""One ModelStreamInfer call: answers its requests in the order in which they came.

One reader and one writer per stream, and no task per message:

    reader   reads a message, decodes it and submits it before it reads the next one. So requests are accepted in the
             order in which the client wrote them, which keeps a sequence's steps in order
    writer   takes the oldest unanswered request, waits for its answer or error, and writes it. An answer that comes
             early waits for those before it (head-of-line, as Triton does). The answers of decoupled models, any number
             for each request, are written as they come, beside the others

The writer runs in the call's handler, the reader in a task that the handler starts. It ends by itself when the client
half-closes or leaves, and when the call ends.

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
from functools import partial

import msgspec

from gateway.bounds.unread_answers import ENTRY_BYTES, UnreadAnswers
from gateway.grpc.codec import RAW_OUTPUTS, OutputForms, encode_stream_answer, encode_stream_error, is_bulky
from gateway.grpc.decoding import Decode, InThread
from gateway.grpc.errors import SHUTTING_DOWN
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import AnyMessage, InferRequest
from gateway.grpc.wire.rpc import wake
from gateway.requests.infer_call import InferCall, input_bytes
from gateway.requests.status import told_of
from gateway.requests.waiting import Answer, OnOpen, OpenRequest
from shared.contract.calls import ANSWERED_KEY, REFUSED
from shared.contract.errors import MeshError, NotReadyError, UnavailableError

OUTSTANDING_BYTES_MAX = 256 << 20
"""Tensors of one stream's unanswered requests and unwritten answers. A single request may be larger: the bound is
checked before a request is read."""
PARTS_MAX = 100_000
"""Answers of decoupled models that wait to be written to one stream. A client that lets more come is not reading."""

Submit = Callable[[InferCall, OnOpen], asyncio.Future[Answer]]
Read = Callable[[], Awaitable[AnyMessage | None]]
Write = Callable[[bytes], Awaitable[None]]


class Outstanding(msgspec.Struct):
    """A request that is not answered yet.

    answer   what it is answered: its future, until the answer or an error is there
    forms    outputs that the client wants otherwise than raw
    size     bytes of its tensors, plus those of its answer once it is there
    unread   bytes of its answer that count as unread until it is written
    wants_empty_final  of a decoupled model, the client wants a last answer that has nothing to give
    """

    request_id: str
    model: str
    answer: asyncio.Future[Answer] | Answer | MeshError
    forms: OutputForms
    size: int
    unread: int = 0
    wants_empty_final: bool = False


class Part(msgspec.Struct):
    """One answer of a decoupled model that waits to be written, or what is said of a request's wait for a slot.

    size     bytes of its tensors
    is_news  it says something of a wait, which nobody needs any more when the answer is there
    """

    request: Outstanding
    content: Answer | MeshError
    is_last: bool
    is_news: bool = False
    size: int = 0
    unread: int = 0


class InferStream:
    """The state of one stream, shared by its reader and its writer.

    write   sends an answer; returns when the client has room for it
    read    gives the next request, None when there is none any more (`gateway.grpc.intake`)
    decode  makes the call of a request, and the forms that its client wants (`gateway.grpc.decoding`)
    unread  counts the answers until they are written
    cut     closes the stream's connection
    in_thread  calls a function in a thread, when it is the client's turn
    """

    def __init__(
        self,
        write: Write,
        read: Read,
        submit: Submit,
        metadata: CallMetadata,
        decode: Decode,
        *,
        unread: UnreadAnswers,
        cut: Callable[[], None],
        in_thread: InThread,
        outstanding_max: int,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
    ) -> None:
        self._write = write
        self._read = read
        self._unread = unread
        self._cut = cut
        self._in_thread = in_thread
        self._submit = submit
        self._metadata = metadata
        self._decode = decode
        self._outstanding_max = outstanding_max
        self._outstanding_bytes_max = outstanding_bytes_max
        self._outstanding: deque[Outstanding] = deque()
        # Requests to decoupled models, by the futures of their last answers; None between `submit` and `_queue`.
        self._open: dict[asyncio.Future[Answer], Outstanding | None] = {}
        self._parts: deque[Part] = deque()
        self._outstanding_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[None] | None = None
        # What the writer waits for, and the reader. Each looks anew when it is woken.
        self._work: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._closed = False
        self._half_closed = False
        self._leaving = False
        self._stopping = False
        self._is_cut = False

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
            wake(self._room)
            if self._reader.done():
                self._reading_ended(self._reader)

    def leave(self) -> None:
        """Ends the call as soon as every request that was read is answered; until then it goes on taking requests.

        The status is UNAVAILABLE, unless the client had half-closed.
        """
        self._leaving = True
        wake(self._work)

    def stop(self) -> None:
        """Takes no further request. The call ends as after `leave`."""
        self._stopping = True
        self.leave()
        wake(self._room)

    # -- reader -----------------------------------------------------------------------------------------------------

    async def _read_requests(self) -> None:
        read, outstanding = self._read, self._outstanding
        while not (self._closed or self._stopping):
            count = len(outstanding) + len(self._open)
            if count >= self._outstanding_max or self._outstanding_bytes >= self._outstanding_bytes_max:
                self._room = self._loop.create_future()
                await self._room
                continue
            try:
                request = await read()
            except UnavailableError as full:
                # No room for this message: it is answered with an error in its turn, and the stream goes on. Any other
                # error, such as a malformed message, ends the reader and with it the call.
                self._queue(Outstanding("", "", full.released(), RAW_OUTPUTS, 0))
                continue
            self._half_closed = request is None
            if request is None or self._closed or self._stopping:
                return
            await self._accept(request)
            # An idle stream would keep it, and in `_write_responses` the answer.
            del request

    async def _accept(self, request: InferRequest) -> None:
        """Submits a request and queues its answer to come. Awaits nothing but the decoding of one that takes long."""
        answer: asyncio.Future[Answer] | MeshError
        forms = RAW_OUTPUTS
        size = 0
        wants_empty_final = False
        try:
            call, forms = await self._decode(request)
            if self._closed:
                return
            size = input_bytes(call)
            wants_empty_final = call.wants_empty_final
            answer = self._submit(call, self._opened)
        except MeshError as error:
            answer = error.released()
        self._queue(
            Outstanding(request.id, request.model_name, answer, forms, size, wants_empty_final=wants_empty_final)
        )

    def _opened(self, opened: OpenRequest) -> None:
        """A request to a decoupled model is about to be sent, or one that asks about its wait. It may have waited here
        for its model to be known."""
        future = opened.future
        opened.hear = partial(self._hear, future)
        if not opened.is_many:
            return
        self._open[future] = next((one for one in self._outstanding if one.answer is future), None)
        if (request := self._open[future]) is not None:
            self._outstanding.remove(request)
            # It may have been the one for which others waited.
            wake(self._work)
        opened.take = partial(self._take, future)

    def _queue(self, outstanding: Outstanding) -> None:
        if self._closed:
            return  # it was refused after the call's end, and nobody writes that any more
        answer = outstanding.answer
        if self._open and answer in self._open:
            self._open[answer] = outstanding
        else:
            self._outstanding.append(outstanding)
        self._outstanding_bytes += outstanding.size
        if not isinstance(answer, asyncio.Future):
            self._has_come(outstanding, answer)
        elif answer.done():
            self._answered(outstanding, answer)
        else:
            answer.add_done_callback(lambda done: self._answered(outstanding, done))

    def _answered(self, request: Outstanding, answer: asyncio.Future[Answer]) -> None:
        """Counts an answer that has come until it is written: it waits for earlier ones, and for the client to read."""
        if self._closed:
            return
        outcome = outcome_of(answer, request.model)
        if self._open and answer in self._open:
            del self._open[answer]
            # Kept until the part is written, with the request's own bytes.
            self._put(request, outcome, is_last=True)
        else:
            self._has_come(request, outcome)

    def _has_come(self, request: Outstanding, outcome: Answer | MeshError) -> None:
        """An answer is there, or an error, whose message may quote what its client likes, as long as it likes."""
        request.answer = outcome
        if isinstance(outcome, MeshError):
            size = len(request.request_id) + len(outcome.message)
        else:
            size = outcome.output_bytes
        request.size += size
        self._outstanding_bytes += size
        request.unread = size + ENTRY_BYTES
        self._unread.add(self, request.unread, self._cut_off)
        if self._outstanding[0] is request:
            wake(self._work)

    def _take(self, future: asyncio.Future[Answer], content: Answer | MeshError) -> None:
        request = self._open[future]
        assert request is not None, "it was queued in the turn of the loop in which it was sent"
        self._put(request, content, is_last=False)

    def _hear(self, future: asyncio.Future[Answer], news: Answer) -> None:
        """A request that waits for a slot hears of its wait: an answer without outputs, beside the others."""
        if not self._closed:
            heard = Outstanding(news.request_id, news.model.config.name, future, RAW_OUTPUTS, 0)
            self._put(heard, news, is_last=False, is_news=True)

    def _put(self, request: Outstanding, content: Answer | MeshError, *, is_last: bool, is_news: bool = False) -> None:
        """An answer of a decoupled model has come. It is counted until it is written."""
        if self._is_cut:
            return
        size = 0 if isinstance(content, MeshError) else content.output_bytes
        self._parts.append(Part(request, content, is_last, is_news, size, size + ENTRY_BYTES))
        self._outstanding_bytes += size
        self._unread.add(self, size + ENTRY_BYTES, self._cut_off)
        if self._are_too_many:
            self._unread.cut(self)
        wake(self._work)

    def _cut_off(self) -> None:
        """The client does not read: its connection is closed, and nothing more is kept for it."""
        self._is_cut = True
        self._cut()

    @property
    def _are_too_many(self) -> bool:
        """Whether so many answers of decoupled models wait that the client cannot be reading. One is never too many."""
        is_beyond = self._outstanding_bytes > 2 * self._outstanding_bytes_max or self._unread.is_beyond(self)
        return len(self._parts) > PARTS_MAX or (is_beyond and len(self._parts) > 1)

    def _reading_ended(self, reader: asyncio.Task[None]) -> None:
        # After the call's end nothing retrieves the reader's exception. Retrieved here, asyncio does not log it.
        if self._closed and not reader.cancelled():
            reader.exception()
        wake(self._work)

    # -- writer -----------------------------------------------------------------------------------------------------

    async def _write_responses(self) -> None:
        write, outstanding, reader = self._write, self._outstanding, self._reader
        assert reader is not None, "the reader starts before the writer"
        while True:
            part = self._parts.popleft() if self._parts else None
            if part is not None:
                await self._write_part(part)
            request = outstanding[0] if outstanding else None
            if request is not None and not isinstance(request.answer, asyncio.Future):
                message = await self._message_of(request, request.answer)
                outstanding.popleft()
                self._outstanding_bytes -= request.size
                wake(self._room)
                try:
                    await write(message)
                finally:
                    del message
                    self._unread.took(self, request.unread)
            elif part is not None:
                continue
            elif request is None and not self._open and reader.done():
                reader.result()
                break
            elif request is None and not self._open and self._leaving:
                break
            else:
                self._work = self._loop.create_future()
                await self._work
        if self._leaving and not self._half_closed:
            raise UnavailableError(SHUTTING_DOWN)

    async def _write_part(self, part: Part) -> None:
        request, content = part.request, part.content
        self._outstanding_bytes -= part.size + (request.size if part.is_last else 0)
        wake(self._room)
        try:
            if part.is_news and isinstance(request.answer, asyncio.Future) and request.answer.done():
                return
            if isinstance(content, MeshError) or not content.message.empty or request.wants_empty_final:
                await self._write(await self._message_of(request, content, is_last=part.is_last))
        finally:
            self._unread.took(self, part.unread)

    async def _message_of(self, request: Outstanding, content: Answer | MeshError, *, is_last: bool = True) -> bytes:
        if isinstance(content, MeshError):
            error = content.released()
        else:
            try:
                if request.forms and is_bulky(content, request.forms):
                    return await self._in_thread(stream_message, content, request.forms)
                return stream_message(content, request.forms)
            except Exception as failure:  # noqa: BLE001  of this request alone: those behind it are other sequences' steps
                error = told_of(failure, "request failed unexpectedly", model=request.model)
        if error.accepted and self._metadata.status_on_error:
            raise error
        message = encode_stream_error(error, request.request_id, request.model, is_last=is_last)
        if self._metadata.call is not None and isinstance(error, NotReadyError):
            message.infer_response.parameters[ANSWERED_KEY].string_param = REFUSED
        return message.SerializeToString()

    def _abandon(self) -> None:
        """Cancels all unanswered requests in one turn of the loop, so that no step is sent whose predecessor is
        cancelled."""
        for answer in [*(request.answer for request in self._outstanding), *self._open]:
            if isinstance(answer, asyncio.Future) and not answer.cancel() and not answer.cancelled():
                # Retrieved, so that asyncio does not log it.
                answer.exception()
        for waiting in (*self._outstanding, *self._parts):
            self._unread.took(self, waiting.unread)
        self._outstanding.clear()
        self._parts.clear()
        self._open.clear()


def outcome_of(answer: asyncio.Future[Answer], model: str) -> Answer | MeshError:
    """The answer that a future has, or the error in its place."""
    error = answer.exception()
    return answer.result() if error is None else told_of(error, "request failed unexpectedly", model=model)


def stream_message(answer: Answer, forms: OutputForms) -> bytes:
    return encode_stream_answer(answer, forms).SerializeToString()
