"""Streams: accepted in the order written, answered in that order, open after an error, closed without loss."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient.grpc import aio as triton_grpc_aio
from tritonclient.utils import InferenceServerException

from gateway.bounds.unread_answers import ENTRY_BYTES, UnreadAnswers
from gateway.grpc import decoding
from gateway.grpc import stream as stream_module
from gateway.grpc.codec import RAW_OUTPUTS, OutputForms, decode_request
from gateway.grpc.metadata import NO_METADATA
from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.stream import Decode, InferStream
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from gateway.settings import GatewaySettings
from shared.contract.calls import ANSWERED_KEY, CALL_KEY, REFUSED, call_value
from shared.contract.errors import MeshError, ModelError, NotReadyError, Reason, RequestError, SequenceError
from tests.gateway.one_at_a_time import one_at_a_time
from tests.gateway.stubs import stub_at

aio: Any = grpc.aio  # the checker does not see all that it exports
# The clients have no types.
triton: Any = triton_grpc
triton_aio: Any = triton_grpc_aio
OUTSTANDING_MAX = 8
NO_BOUND = UnreadAnswers(1 << 30)


def request(number: int, **fields: Any) -> Any:
    made = pb.ModelInferRequest(model_name="sum", id=str(number), **fields)
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    made.raw_input_contents.append(number.to_bytes(4, "little"))
    made.parameters["sequence_id"].int64_param = 1 + number % 3
    return made


def int_input(number: int) -> Any:
    tensor = triton.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[number]], dtype=np.int32))
    return tensor


def broken_at(request_id: str, twin: Any) -> Callable[[InferCall], Answer | MeshError]:
    error = ModelError("it broke")
    error.accepted = True

    def respond(call: InferCall) -> Answer | MeshError:
        return error if call.request_id == request_id else twin.answer(call)

    return respond


async def read_all(call: Any) -> list[Any]:
    responses: list[Any] = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


def ids(responses: list[Any]) -> list[str]:
    return [response.infer_response.id for response in responses]


async def test_answers_leave_in_request_order_though_they_are_ready_in_another(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelStreamInfer()
    for number in range(5):
        await call.write(request(number))
    await twin.wait_for_calls(5)

    for number in (3, 1, 4, 0, 2):
        twin.finish(number)
    await call.done_writing()

    assert [str(number) for number in range(5)] == ids(await read_all(call))
    assert await call.code() is grpc.StatusCode.OK


async def test_requests_are_submitted_in_the_order_written_before_any_is_answered(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelStreamInfer()

    for number in range(OUTSTANDING_MAX):
        await call.write(request(number))
    await twin.wait_for_calls(OUTSTANDING_MAX)

    assert [str(number) for number in range(OUTSTANDING_MAX)] == [made.request_id for made in twin.calls]
    call.cancel()


async def test_an_error_takes_its_place_in_the_order_and_the_stream_stays_open(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelStreamInfer()
    for number in range(3):
        await call.write(request(number))
    await twin.wait_for_calls(3)
    twin.futures[1].set_exception(SequenceError("the sequence has ended", Reason.ENDED, 9))
    twin.finish(2)
    twin.finish(0)
    responses = [await call.read() for _ in range(3)]

    assert ["", "the sequence has ended", ""] == [response.error_message for response in responses]
    assert ["0", "1", "2"] == ids(responses)
    assert responses[1].infer_response.parameters["reason"].string_param == "ended"
    assert responses[1].infer_response.parameters["last_step"].int64_param == 9

    await call.write(request(3))
    await twin.wait_for_calls(4)
    twin.finish(3)
    await call.done_writing()

    assert ids(await read_all(call)) == ["3"]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_request_that_cannot_be_decoded_fails_alone_and_in_its_place(stub: Any, twin: Any) -> None:
    bad = request(1)
    bad.parameters["sequence_start"].int64_param = 1
    call = stub.ModelStreamInfer()
    for made in (request(0), bad, request(2)):
        await call.write(made)
    await call.done_writing()

    responses = await read_all(call)

    assert ["0", "1", "2"] == ids(responses)
    assert responses[1].error_message == "invalid value type for 'sequence_start' parameter, expected bool_param."
    assert ["0", "2"] == [made.request_id for made in twin.calls]


async def test_half_close_finishes_what_is_outstanding_then_ends_with_ok(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelStreamInfer()
    for number in range(3):
        await call.write(request(number))
    await call.done_writing()
    await twin.wait_for_calls(3)
    assert not call.done()

    for number in (2, 0, 1):
        twin.finish(number)

    assert ["0", "1", "2"] == ids(await read_all(call))
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_without_requests_ends_with_ok(stub: Any) -> None:
    call = stub.ModelStreamInfer()
    await call.done_writing()

    assert await read_all(call) == []
    assert await call.code() is grpc.StatusCode.OK


async def test_cancelling_abandons_all_answers_in_one_turn_and_leaves_the_server_serving(stub: Any, twin: Any) -> None:
    # Found by chaos: the head went a turn before the others. The dispatcher left it out and sent those behind it.
    seen: list[list[bool]] = []

    def look(_: object) -> None:
        seen.append([future.cancelled() for future in twin.futures])

    def hold(_: InferCall) -> None:
        twin.futures[-1].add_done_callback(look)

    twin.respond = hold
    call = stub.ModelStreamInfer()
    for number in range(3):
        await call.write(request(number))
    await twin.wait_for_calls(3)

    call.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(twin.futures)
        await asyncio.sleep(0)
    assert [[True, True, True]] * 3 == seen

    twin.respond = twin.answer
    again = stub.ModelStreamInfer()
    await again.write(request(7))
    await again.done_writing()
    assert ids(await read_all(again)) == ["7"]


async def test_at_the_bound_the_stream_is_read_no_further_until_an_answer_leaves(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelStreamInfer()

    async def write() -> None:
        for number in range(3 * OUTSTANDING_MAX):
            await call.write(request(number))
        await call.done_writing()

    writing = asyncio.create_task(write())
    await twin.wait_for_calls(OUTSTANDING_MAX)
    await stub.ServerLive(pb.ServerLiveRequest())  # time enough for one more read, were there one
    assert len(twin.calls) == OUTSTANDING_MAX

    twin.finish(0)
    await twin.wait_for_calls(OUTSTANDING_MAX + 1)

    twin.respond = twin.answer
    for number in range(1, OUTSTANDING_MAX + 1):
        twin.finish(number)
    responses = await read_all(call)
    await writing
    assert [str(number) for number in range(3 * OUTSTANDING_MAX)] == ids(responses)


async def test_on_request_the_first_error_of_a_model_ends_the_stream_with_its_status(stub: Any, twin: Any) -> None:
    call = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    twin.respond = twin.hold
    for number in range(3):
        await call.write(request(number))
    await twin.wait_for_calls(3)  # else the stream may have ended before the last of them is written
    respond = broken_at("1", twin)
    twin.finish(0)
    twin.futures[1].set_exception(respond(twin.calls[1]))

    first = await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)

    assert first.infer_response.id == "0"
    assert (grpc.StatusCode.INTERNAL, "it broke") == (caught.value.code(), caught.value.details())


async def test_a_refusal_never_ends_the_stream(stub: Any, twin: Any) -> None:
    call = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    twin.fail(RequestError("refused"))
    await call.write(request(0))
    refused = await call.read()
    twin.respond = twin.answer
    await call.write(request(1))
    await call.done_writing()

    assert (refused.error_message, refused.infer_response.id) == ("refused", "0")
    assert ids(await read_all(call)) == ["1"]


async def test_a_model_that_calls_hears_in_a_stream_too_whether_another_gateway_would_say_the_same(
    stub: Any, twin: Any
) -> None:
    """A client has no use for that."""

    def full(_: InferCall) -> MeshError:
        return NotReadyError("Exceeds maximum queue size")

    twin.respond, said = full, list[str]()
    for metadata in ([(CALL_KEY, call_value("call-1", ["caller"]))], []):
        call = stub.ModelStreamInfer(metadata=metadata)
        await call.write(request(0))
        await call.done_writing()
        said += [one.infer_response.parameters[ANSWERED_KEY].string_param for one in await read_all(call)]

    assert [REFUSED, ""] == said


async def test_large_requests_are_bounded_by_their_bytes(twin: Any) -> None:
    """One larger than the bound is let through alone; the next is read when it has been answered."""
    twin.respond = twin.hold
    call = CallTwin()

    stream = stream_of(call, reads_of(3), twin, outstanding_bytes_max=3)
    running = asyncio.create_task(stream.run())
    for number in range(3):
        await twin.wait_for_calls(number + 1)
        await asyncio.sleep(0)
        assert len(twin.calls) == number + 1
        twin.finish(number)
    await running

    assert ["0", "1", "2"] == ids(call.written)


@pytest.mark.parametrize("at_once", [True, False])
async def test_answers_that_a_client_does_not_read_count_until_they_are_written(twin: Any, at_once: bool) -> None:
    """Requests and answers have four bytes each: with room for twenty, three wait behind the one that is written."""
    twin.respond = twin.answer if at_once else twin.hold
    call = CallTwin()
    reads = asyncio.Event()

    async def write(message: bytes) -> None:
        await reads.wait()
        call.written.append(pb.ModelStreamInferResponse.FromString(message))

    call.write = write
    stream = stream_of(call, reads_of(20), twin, outstanding_bytes_max=20)
    running = asyncio.create_task(stream.run())
    for _ in range(100):
        await asyncio.sleep(0)
        for number, future in enumerate(twin.futures):
            if not future.done():
                twin.finish(number)
    # Requests alone would let six be read.
    assert 4 <= len(twin.calls) <= (4 if at_once else 5)

    twin.respond = twin.answer
    reads.set()
    await running
    assert [str(number) for number in range(20)] == ids(call.written)


async def test_an_answer_that_comes_while_another_is_written_counts_as_any_other(twin: Any) -> None:
    """It is counted before it is written, so that nothing stays counted afterwards."""
    twin.respond = twin.hold
    call = CallTwin()

    async def write(message: bytes) -> None:
        call.written.append(pb.ModelStreamInferResponse.FromString(message))
        if len(call.written) == 1:
            twin.finish(1)

    call.write = write
    unread = UnreadAnswers(1 << 20)
    stream = stream_of(call, reads_of(3), twin, unread=unread)
    running = asyncio.create_task(stream.run())
    await twin.wait_for_calls(3)
    twin.finish(0)
    for _ in range(5):
        await asyncio.sleep(0)
    twin.finish(2)
    await running

    assert ["0", "1", "2"] == ids(call.written)
    assert unread.taken == 0


async def test_an_idle_stream_keeps_nothing_of_its_last_request_and_answer(
    twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be idle for hours, and they may have megabytes: nothing counts them then."""

    class Request(SimpleNamespace):
        """As a message, but it can be referred to weakly; so can an answer."""

    kept: list[weakref.ref[Request]] = []
    numbers = iter(range(1))

    async def read() -> Any:
        if (number := next(numbers, None)) is None:
            await asyncio.Event().wait()
        one = Request(id=str(number), model_name="sum", message=request(number or 0))
        kept.append(weakref.ref(one))
        return one

    async def decode(one: Any) -> tuple[InferCall, OutputForms]:
        return decode_request(one.message), RAW_OUTPUTS

    def answer(*_: object) -> Any:
        made = Request()
        kept.append(weakref.ref(made))
        return made

    async def write(message: bytes) -> None:
        del message

    monkeypatch.setattr(stream_module, "stream_message", answer)
    call = CallTwin()
    call.write = write
    running = asyncio.create_task(stream_of(call, read, twin, decode=decode).run())
    async with asyncio.timeout(60):
        while len(kept) < 2 or any(one() is not None for one in kept):
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])


async def test_refusals_that_nobody_reads_count_as_unread(twin: Any) -> None:
    """With what they say, which may quote a long id."""
    text = "no" * 1000
    twin.fail(RequestError(text))
    call, unread = CallTwin(), UnreadAnswers(1 << 20)
    reads = asyncio.Event()
    written: list[int] = []

    async def write(message: bytes) -> None:
        await reads.wait()
        written.append(len(message))

    call.write = write
    running = asyncio.create_task(stream_of(call, reads_of(50), twin, unread=unread).run())
    await twin.wait_for_calls(50)
    assert 50 * (ENTRY_BYTES + len(text)) + sum(len(str(number)) for number in range(50)) == unread.taken
    reads.set()
    await running

    assert (50, 0) == (len(written), unread.taken)


async def test_what_is_refused_when_the_client_has_left_counts_as_nothing(twin: Any) -> None:
    """Nobody writes it, so nothing would ever count it off, or let go of the stream and its connection."""
    unread = UnreadAnswers(1 << 20)
    decodes, leaves = asyncio.Event(), asyncio.Event()

    async def refused(_: object) -> Any:
        decodes.set()
        await leaves.wait()
        raise RequestError("no")

    stream = stream_of(CallTwin(), reads_of(1), twin, unread=unread, decode=refused)
    running = asyncio.create_task(stream.run())
    await decodes.wait()
    running.cancel()
    await asyncio.wait([running])
    leaves.set()
    for _ in range(3):
        await asyncio.sleep(0)

    assert unread.taken == 0


async def test_many_strings_are_read_beside_the_loop_and_keep_their_place(
    stub: Any, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written after them is submitted after them; a unary call's are read there too."""
    monkeypatch.setattr("gateway.requests.forms.STRINGS_BYTES_MAX", 8)
    readers: list[int] = []

    def slowly(raw: bytes, *_: object) -> str:
        readers.append(threading.get_ident())
        time.sleep(0.05)
        return "" if raw == bytes(12) else "no"

    monkeypatch.setattr("gateway.requests.forms.string_problem", slowly)

    def strings(number: int, raw: bytes) -> Any:
        made = request(number)
        made.inputs[0].datatype, made.raw_input_contents[0] = "BYTES", raw
        return made

    call = stub.ModelStreamInfer()
    for made in (strings(0, bytes(12)), request(1), strings(2, b"x" * 12), request(3)):
        await call.write(made)
    await call.done_writing()
    assert [str(number) for number in range(4)] == ids(await read_all(call))
    await stub.ModelInfer(strings(4, bytes(12)))

    assert [str(number) for number in range(5)] == [made.request_id for made in twin.calls]
    assert [{"INPUT": ""}, None, {"INPUT": "no"}, None, {"INPUT": ""}] == [made.string_problems for made in twin.calls]
    assert 3 == len(readers)
    assert threading.get_ident() not in readers


@pytest.mark.parametrize(
    ("bound", "work"),
    [
        ("gateway.grpc.decoding.VALUES_MAX", "decode_request"),
        ("gateway.requests.forms.STRINGS_BYTES_MAX", "with_strings_read"),
    ],
)
async def test_what_takes_long_is_read_beside_the_loop_one_at_a_time(
    stub: Any, monkeypatch: pytest.MonkeyPatch, bound: str, work: str
) -> None:
    monkeypatch.setattr(bound, 0)
    made = request(1)
    made.ClearField("raw_input_contents")
    made.inputs[0].datatype, made.inputs[0].contents.bytes_contents[:] = "BYTES", [b"a"]
    with one_at_a_time(monkeypatch, decoding, work) as readers:
        await asyncio.gather(*(stub.ModelInfer(made) for _ in range(8)))

    assert 8 == len(readers)
    assert threading.get_ident() not in readers


class CallTwin:
    """What a stream needs of its call."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: bytes) -> None:
        self.written.append(pb.ModelStreamInferResponse.FromString(message))


def reads_of(count: int) -> Callable[[], Awaitable[Any]]:
    """What a stream reads of a client that sends so many requests."""
    numbers = iter(range(count))

    async def read() -> Any:
        number = next(numbers, None)
        return None if number is None else request(number)

    return read


async def decoded(request: Any) -> tuple[InferCall, OutputForms]:
    return decode_request(request), RAW_OUTPUTS


def stream_of(
    call: CallTwin,
    read: Any,
    twin: Any,
    *,
    outstanding_bytes_max: int = 1 << 30,
    unread: UnreadAnswers = NO_BOUND,
    decode: Decode = decoded,
) -> InferStream:
    return InferStream(
        call.write,
        read,
        lambda call, _on_open: twin.submit(call),
        NO_METADATA,
        decode,
        unread=unread,
        cut=lambda: None,
        in_thread=asyncio.to_thread,
        outstanding_max=100,
        outstanding_bytes_max=outstanding_bytes_max,
    )


async def test_stopping_answers_what_was_accepted_and_then_says_unavailable(
    twin: Any, make_servicer: Callable[[], InferenceServicer], grpc_settings: GatewaySettings
) -> None:
    twin.respond = twin.hold
    server = await serve_grpc(make_servicer(), grpc_settings)
    async with stub_at(server.port) as stub:
        call = stub.ModelStreamInfer()
        await call.write(request(0))
        await twin.wait_for_calls(1)

        stopping = asyncio.create_task(server.stop(600))
        await asyncio.sleep(0)
        assert not stopping.done()
        twin.finish(0)

        assert (await call.read()).infer_response.id == "0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "GRPC server is shutting down and has stopped accepting new requests."
        async with asyncio.timeout(60):  # an open stream does not use up the grace
            await stopping


# -- the ordinary client --------------------------------------------------------------------------------------------


async def test_tritonclient_streams_with_a_callback(rpc_server: GrpcServer, twin: Any) -> None:
    twin.respond = broken_at("2", twin)

    def stream() -> list[tuple[str, str]]:
        results: queue.Queue[tuple[str, str]] = queue.Queue()

        def callback(result: Any, error: InferenceServerException | None) -> None:
            results.put((result.get_response().id, "") if error is None else ("", error.message()))

        with triton.InferenceServerClient(f"127.0.0.1:{rpc_server.port}") as client:
            client.start_stream(callback=callback)
            for number in range(4):
                client.async_stream_infer(
                    "sum",
                    [int_input(number)],
                    request_id=str(number),
                    sequence_id=42,
                    sequence_start=number == 0,
                    sequence_end=number == 3,
                )
            client.stop_stream()  # half-closes and waits for the answers
        return [results.get_nowait() for _ in range(4)]

    assert [("0", ""), ("1", ""), ("", "it broke"), ("3", "")] == await asyncio.to_thread(stream)
    assert [(42, True, False), (42, False, False), (42, False, False), (42, False, True)] == [
        (made.correlation_id, made.start, made.end) for made in twin.calls
    ]


async def test_tritonclient_hears_of_its_cancelled_stream_once(rpc_server: GrpcServer, twin: Any) -> None:
    twin.respond = twin.hold

    def stream() -> list[str]:
        errors: list[str] = []

        def callback(result: Any, error: Any) -> None:
            errors.append(str(error.status()))

        with triton.InferenceServerClient(f"127.0.0.1:{rpc_server.port}") as client:
            client.start_stream(callback=callback)
            client.async_stream_infer("sum", [int_input(1)])
            while not twin.calls:
                pass
            client.stop_stream(cancel_requests=True)
        return errors

    assert await asyncio.to_thread(stream) == ["StatusCode.CANCELLED"]


async def test_tritonclient_aio_streams(rpc_server: GrpcServer) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            yield {
                "model_name": "sum",
                "inputs": [int_input(number)],
                "request_id": str(number),
                "sequence_id": "text",
                "sequence_start": number == 0,
            }

    received: list[tuple[str, int]] = []
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(triton_aio.InferenceServerClient(f"127.0.0.1:{rpc_server.port}"))
        async for result, error in client.stream_infer(requests()):
            assert error is None
            received.append((result.get_response().id, int(result.as_numpy("OUTPUT0")[0, 0])))

    assert [("0", 0), ("1", 1), ("2", 2)] == received


async def test_streams_that_end_at_odd_moments_leave_nothing_behind(
    twin: Any, make_servicer: Callable[[], InferenceServicer], grpc_settings: GatewaySettings
) -> None:
    """Cancelled or ended by an error while a read is out, half-closed or not: reader, writer and futures all end."""
    servicer = make_servicer()
    server = await serve_grpc(servicer, grpc_settings)
    chance = random.Random(7)

    def readers() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "grpc stream reader"]

    def respond(call: InferCall) -> Answer | MeshError | None:
        return chance.choice([twin.answer(call), ModelError("it broke"), None])

    async def use(stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        call = stub.ModelStreamInfer(metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            for number in range(chance.randrange(2 * OUTSTANDING_MAX)):
                # A client that may be held up by flow control must not wait for ever.
                await asyncio.wait_for(call.write(request(number)), 0.2)
                if chance.random() < 0.2:
                    await asyncio.sleep(0)
        call.cancel()

    twin.respond = respond
    async with stub_at(server.port) as stub:
        for metadata in ((), (("triton_grpc_error", "true"),)):
            await asyncio.gather(*(use(stub, metadata) for _ in range(40)))
        async with asyncio.timeout(60):
            # Behind all others: in a busy process, the server may not have heard of those whose clients have left.
            await stub.ServerLive(pb.ServerLiveRequest())
            while server.limit.open or servicer._streams or readers():
                await asyncio.sleep(0.01)
    assert all(future.done() for future in twin.futures)
    await server.stop(0)
