"""Calls through gateways that answer, refuse, die, or never answer: real gRPC servers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import msgspec
import numpy as np
import pytest
from grpc.aio._call import StreamStreamCall
from tritonclient.grpc import service_pb2, service_pb2_grpc

from executor.calls import client as client_module
from executor.calls.client import CallClient, Stream
from executor.calls.gateways import SILENT_S, CallGateway, Gateways
from executor.calls.protocol import RETRY_KEY, request_of
from executor.engine.base import Origin
from executor.engine.python.calls import CallAnswer, ModelCall
from executor.settings import ExecutorSettings
from shared.contract.calls import ACCEPTED, ANSWERED_KEY, CALL_KEY, FULL, REFUSED, read_call
from shared.contract.ids import SequenceId
from shared.contract.messages import InferMessage
from shared.contract.tensors import from_numpy
from shared.store.company import ServiceLine, call_addresses
from shared.store.work_scripts import OVERDUE

pb: Any = service_pb2
Servicer: Any = service_pb2_grpc.GRPCInferenceServiceServicer
CALL = ModelCall(
    number=1,
    model="sum",
    version="",
    request_id="",
    correlation_id=(1 << 64) - 1,
    flags=3,
    inputs=(from_numpy("INPUT", np.array([[5]], np.int32)),),
    outputs=("OUTPUT",),
    timeout_us=9,
    parameters={"text": "x", "yes": True, "count": -4},
    name="call-1",
    chain=("a#1f", "b"),
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
Handle = Callable[[Any, Any], Awaitable[Any]]


def answer(request: Any) -> Any:
    response = pb.ModelInferResponse(model_name=request.model_name)
    response.outputs.add(name="OUTPUT", datatype="INT32", shape=[1, 1])
    response.raw_output_contents.append(request.raw_input_contents[0])
    response.parameters["said"].string_param = "yes"
    return response


class FakeGateway(Servicer):
    """A gateway that does as it is told. handle: answers a unary call; calls_max: further ones are refused"""

    def __init__(self, handle: Handle, calls_max: int | None = None) -> None:
        self._handle = handle
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.server: Any = grpc.aio.server(maximum_concurrent_rpcs=calls_max)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.address = f"grpc://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return await self._handle(request, context)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        return await self._handle(request, context)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            self.requests.append(request)
            for index in range(3):
                message = pb.ModelStreamInferResponse(infer_response=answer(request))
                message.infer_response.parameters["triton_final_response"].bool_param = index == 2
                yield message


async def answering(request: Any, context: Any) -> Any:
    return answer(request)


async def never(request: Any, context: Any) -> Any:
    await asyncio.sleep(600)


def refusing(code: Any, *trailing: tuple[str, str], text: str = "not now") -> Handle:
    async def refuse(request: Any, context: Any) -> Any:
        await context.abort(code, text, trailing)

    return refuse


class Caller:
    """A client, called as models call: from a thread."""

    def __init__(self, gateways: list[FakeGateway], timeout_s: float = 60.0) -> None:
        settings = ExecutorSettings(models=(), calls_through=tuple(gateway.address for gateway in gateways))
        unused: Any = None
        self.client = CallClient(Gateways(settings, unused, unused), timeout_s=timeout_s, headers={"X-Key": "secret"})

    async def __call__(self, call: ModelCall = CALL) -> CallAnswer:
        return await asyncio.to_thread(lambda: self.client.start(call).result())

    async def start(self, call: ModelCall) -> Future[CallAnswer]:
        return await asyncio.to_thread(self.client.start, call)


Make = Callable[..., Awaitable[Caller]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    callers: list[Caller] = []
    servers: list[FakeGateway] = []

    async def made(*gateways: FakeGateway, **options: Any) -> Caller:
        for gateway in gateways:
            await gateway.server.start()
            servers.append(gateway)
        callers.append(Caller(list(gateways), **options))
        return callers[-1]

    yield made
    for caller in callers:
        await caller.client.close()
    for gateway in servers:
        await gateway.server.stop(None)


async def test_a_call_carries_all_that_the_model_said_and_who_waits(make: Make) -> None:
    gateway = FakeGateway(answering)
    caller = await make(gateway)

    said = await caller()

    assert ("", (1, 1), {"said": "yes"}) == (said.error_code, said.outputs[0].shape, said.parameters)
    (request,) = gateway.requests
    parameters = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
    assert {
        "sequence_id": -1,  # as clients write ids beyond int64
        "sequence_start": True,
        "sequence_end": True,
        "timeout": 9,
        "text": "x",
        "yes": True,
        "count": -4,
    } == parameters
    assert ("call-1", ["OUTPUT"]) == (request.id, [output.name for output in request.outputs])
    (metadata,) = gateway.metadata
    origin = read_call(metadata[CALL_KEY])
    assert ("call-1", ("a#1f", "b"), 0) == (origin.name, origin.chain, origin.deadline_ms)
    assert (CALL.traceparent, "secret") == (metadata["traceparent"], metadata["x-key"])
    assert [("b", "sum")] == [*caller.client.edges]


async def test_a_large_request_is_encoded_beside_the_event_loop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noticed(call: ModelCall, first_answer: int = 0) -> bytes:
        threads.add(threading.get_ident())
        return request_of(call, first_answer)

    monkeypatch.setattr(client_module, "BULKY_BYTES", 200)
    monkeypatch.setattr(client_module, "request_of", noticed)
    gateway = FakeGateway(answering)
    caller = await make(gateway)
    await caller()
    assert {threading.get_ident()} == threads
    threads.clear()
    large = from_numpy("INPUT", np.arange(100, dtype=np.int32))
    said = await caller(msgspec.structs.replace(CALL, inputs=(large, CALL.inputs[0])))

    assert [large.raw, CALL.inputs[0].raw] == list(gateway.requests[-1].raw_input_contents)
    assert large.raw == said.outputs[0].raw
    assert 1 == len(threads - {threading.get_ident()})


async def test_a_model_that_calls_ever_new_names_takes_no_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "EDGES_MAX", 2)
    caller = await make(FakeGateway(answering))
    for name in ("x", "y", "x", "z"):
        await caller(msgspec.structs.replace(CALL, model=name))

    assert [("b", "x"), ("b", "z")] == [*caller.client.edges]


async def test_the_request_id_of_a_model_is_its_own(make: Make) -> None:
    gateway = FakeGateway(answering)
    caller = await make(gateway)

    await caller(msgspec.structs.replace(CALL, request_id="mine"))
    await caller(msgspec.structs.replace(CALL, correlation_id=0))

    assert ["mine", ""] == [request.id for request in gateway.requests]


async def serves_the_first_version_of_sum(request: Any, context: Any) -> Any:
    if not request.version.isdecimal() and request.version:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a version is a number")
    return pb.ModelReadyResponse(ready=request.name == "sum" and request.version in ("", "1"))


@pytest.mark.parametrize(
    ("model", "version", "expected"),
    [
        ("sum", "", CallAnswer(is_ready=True)),
        ("sum", "1", CallAnswer(is_ready=True)),
        ("sum", "2", CallAnswer()),
        ("other", "", CallAnswer()),
        ("sum", "1a", CallAnswer(error_code="INVALID_ARG", error="a version is a number")),
    ],
)
async def test_a_gateway_says_whether_a_model_is_ready(
    make: Make, model: str, version: str, expected: CallAnswer
) -> None:
    gateway = FakeGateway(serves_the_first_version_of_sum)
    caller = await make(gateway)

    assert expected == await caller(ModelCall(1, model, version, asks_readiness=True))
    assert CALL_KEY in gateway.metadata[0]


async def test_no_proxy_of_the_environment_is_asked_for_a_gateway(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        caller = await make(FakeGateway(answering))

        assert "" == (await caller()).error


async def test_another_gateway_is_asked_when_one_has_gone(make: Make) -> None:
    gone, living = FakeGateway(answering), FakeGateway(serves_the_first_version_of_sum)
    caller = await make(gone, living)
    await gone.server.stop(None)

    answers = [await caller(ModelCall(number, "sum", asks_readiness=True)) for number in range(1, 5)]

    assert [CallAnswer(is_ready=True)] * 4 == answers


async def test_when_a_gateway_dies_its_calls_are_made_again_through_another_one(make: Make) -> None:
    async def die(request: Any, context: Any) -> Any:
        asyncio.get_running_loop().create_task(dying[len(tried)].server.stop(None))
        tried.append(request.id)
        await asyncio.sleep(600)

    tried: list[str] = []
    dying = [FakeGateway(die)]
    # Whichever comes first: only one of the two lives.
    living = FakeGateway(answering)
    caller = await make(*dying, living)

    answers = [await caller() for _ in range(4)]

    assert [""] * 4 == [one.error_code for one in answers]
    assert tried in ([], ["call-1"])


async def test_the_connection_to_a_gateway_whose_machine_is_lost_ends(make: Make) -> None:
    """Otherwise every call would go there until its deadline, for a quarter of an hour."""
    gateway = FakeGateway(answering)
    caller = await make(gateway)
    await caller()

    assert [SILENT_S * 1000] == list(user_timeouts_ms(to_port=int(gateway.address.rpartition(":")[2])))


def user_timeouts_ms(to_port: int) -> Iterator[int]:
    """Of this process's connections: how long what they send may stay unacknowledged."""
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(one.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == to_port:
                yield connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


async def test_a_call_that_had_waited_longer_than_its_patience_when_its_gateway_died_finds_another_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(request: Any, context: Any) -> Any:
        asyncio.get_running_loop().create_task(dying.server.stop(None))
        await asyncio.sleep(600)

    monkeypatch.setattr(client_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr("random.choice", itemgetter(0))
    dying, living = FakeGateway(die), FakeGateway(answering)
    caller = await make(dying, living)

    assert "" == (await caller()).error_code
    assert [1, 1] == [len(gateway.requests) for gateway in (dying, living)]


async def test_what_the_mesh_asks_for_again_is_sent_again(make: Make) -> None:
    async def busy_once(request: Any, context: Any) -> Any:
        if len(gateway.requests) < 3:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", (("seqmesh-retry", "same"),))
        return answer(request)

    gateway = FakeGateway(busy_once)
    caller = await make(gateway)

    assert "" == (await caller()).error_code
    assert 3 == len(gateway.requests)


@pytest.mark.parametrize("others", [0, 1])
async def test_a_gateway_without_room_for_another_call_is_asked_later_or_another_one_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    begun, leave = asyncio.Event(), asyncio.Event()

    async def held(request: Any, context: Any) -> Any:
        begun.set()
        await leave.wait()
        return answer(request)

    def lost(gateways: Gateways, gateway: CallGateway) -> None:
        tell_lost(gateways, gateway)
        if not others:
            leave.set()

    tell_lost = Gateways.lost
    monkeypatch.setattr(Gateways, "lost", lost)
    monkeypatch.setattr("random.choice", itemgetter(0))
    caller = await make(FakeGateway(held, calls_max=1), *(FakeGateway(answering) for _ in range(others)))
    calls = [await caller.start(CALL)]
    await begun.wait()
    calls.append(await caller.start(msgspec.structs.replace(CALL, number=2, correlation_id=8)))
    said = await asyncio.wrap_future(calls[1])
    leave.set()

    assert ["", ""] == [said.error_code, (await asyncio.wrap_future(calls[0])).error_code]


@pytest.mark.parametrize(
    ("code", "trailing", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, (), ("INVALID_ARG", "Model sum - Error when running inference: not now")),
        (grpc.StatusCode.INVALID_ARGUMENT, ((ANSWERED_KEY, ACCEPTED),), ("INVALID_ARG", "not now")),
        (grpc.StatusCode.UNAVAILABLE, ((ANSWERED_KEY, ACCEPTED),), ("UNAVAILABLE", "not now")),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), None),
        (grpc.StatusCode.INVALID_ARGUMENT, (("seqmesh-retry", "start"), (ANSWERED_KEY, ACCEPTED)), None),
    ],
)
async def test_an_answer_is_an_answer(make: Make, code: Any, trailing: Any, expected: tuple[str, str] | None) -> None:
    gateway = FakeGateway(refusing(code, *trailing))
    caller = await make(gateway)

    said = await caller()

    assert 1 == len(gateway.requests)
    assert expected in (None, (said.error_code, said.error))


async def test_without_a_gateway_a_call_fails_when_patience_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.2)
    gateway = FakeGateway(refusing(grpc.StatusCode.UNAVAILABLE))
    caller = await make(gateway)

    said = await caller()

    assert "UNAVAILABLE" == said.error_code
    assert 1 < len(gateway.requests)


REPLAYED = msgspec.structs.replace(CALL, replayed=(SequenceId("b||7"), 5))
STATELESS = msgspec.structs.replace(REPLAYED, correlation_id=0)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (REPLAYED, (UNAVAILABLE, "no executor serves model 'sum' at the moment")),
        (REPLAYED, (grpc.StatusCode.DEADLINE_EXCEEDED, "")),
        (REPLAYED, (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", (RETRY_KEY, "same"))),
        (REPLAYED, (UNAVAILABLE, "Exceeds maximum queue size", (ANSWERED_KEY, REFUSED))),
        (STATELESS, (UNAVAILABLE, OVERDUE, (ANSWERED_KEY, ACCEPTED))),
    ],
)
async def test_a_replayed_step_asks_again_for_as_long_as_its_sequence_is_owned(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: ModelCall, refusal: tuple[Any, ...]
) -> None:
    """However long that is: its patience is over at once here, and its time soon."""
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(client_module, "PAUSE_MAX_S", 0.05)
    code, text, *trailing = refusal
    refuse, owned = refusing(code, *trailing, text=text), {("b||7", 5)}

    async def refuse_for_long(request: Any, context: Any) -> Any:
        return await (answering if owned and len(gateway.requests) == 8 else refuse)(request, context)

    gateway = FakeGateway(refuse_for_long)
    caller = await make(gateway, timeout_s=0.2)
    with caller.client.replaying(lambda sequence, epoch: (sequence, epoch) in owned):
        assert ("", 8) == ((await caller(call)).error_code, len(gateway.requests))

        owned.clear()
        assert "" != (await caller(call)).error_code
    assert 9 == len(gateway.requests)


@pytest.mark.parametrize(
    "refusal",
    [
        (UNAVAILABLE, "Request for unknown model: 'sum' version 2 is not at ready state", (ANSWERED_KEY, REFUSED)),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'sum' is not found"),
        (UNAVAILABLE, OVERDUE, (ANSWERED_KEY, ACCEPTED)),
        (grpc.StatusCode.ALREADY_EXISTS, "its answer is kept no longer", (RETRY_KEY, "no")),
    ],
)
async def test_an_answer_is_an_answer_to_a_replayed_step_too(make: Make, refusal: tuple[Any, ...]) -> None:
    """A sequence's step that has failed is answered with its error for ever. A model may do without another one."""
    code, text, *trailing = refusal
    gateway = FakeGateway(refusing(code, *trailing, text=text))
    caller = await make(gateway)
    with caller.client.replaying(lambda _sequence, _epoch: True):
        assert "" != (await caller(REPLAYED)).error_code

    assert 1 == len(gateway.requests)


async def test_a_stream_of_responses_to_a_replayed_step_is_asked_for_again_too(make: Make) -> None:
    class Refusing(FakeGateway):
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            if len(self.requests) == 3:
                async for message in super().ModelStreamInfer(requests, context):
                    yield message
                return
            self.requests += [request async for request in requests]
            message = pb.ModelStreamInferResponse(error_message="no executor serves model 'sum' at the moment")
            message.infer_response.parameters["code"].string_param = "UNAVAILABLE"
            yield message

    caller = await make(gateway := Refusing(answering))
    with caller.client.replaying(lambda _sequence, _epoch: True):
        stream = await asyncio.to_thread(caller.client.stream, REPLAYED)
        said = [await asyncio.to_thread(lambda: stream.read().result()) for _ in range(4)]

    assert (4, ["", "", "", None]) == (len(gateway.requests), [one and one.error_code for one in said])


@pytest.mark.parametrize(
    ("about", "expected"),
    [({}, ["", "", "", None]), ({ANSWERED_KEY: REFUSED}, ["UNAVAILABLE", None])],
    ids=["of this gateway", "of the mesh"],
)
async def test_a_refusal_within_a_stream_is_an_answer_only_if_every_gateway_would_say_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, about: dict[str, str], expected: list[str | None]
) -> None:
    """A gateway that stops, or is full, refuses within a stream what it refuses any other call by its status."""

    class Stopping(FakeGateway):
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            self.requests += [request async for request in requests]
            message = pb.ModelStreamInferResponse(error_message="the gateway has stopped")
            for name, value in {"code": "UNAVAILABLE", **about}.items():
                message.infer_response.parameters[name].string_param = value
            yield message

    monkeypatch.setattr("random.choice", itemgetter(0))
    caller = await make(Stopping(answering), FakeGateway(answering))
    stream = await asyncio.to_thread(caller.client.stream, CALL)
    said = [await asyncio.to_thread(lambda: stream.read().result()) for _ in expected]

    assert expected == [one and one.error_code for one in said]


async def test_a_stream_is_over_when_the_executor_stops(make: Make) -> None:
    """A model that gathers all responses would have gathered this answer for ever."""
    caller = await make(FakeGateway(answering))
    stream = await asyncio.to_thread(caller.client.stream, CALL)
    said = [await asyncio.to_thread(lambda: stream.read().result())]
    await caller.client.close()
    said += [await asyncio.to_thread(lambda: stream.read().result()) for _ in range(2)]

    assert ["", "the executor stops", None] == [one and one.error for one in said]


async def test_a_deadline_answers_and_is_passed_on(make: Make) -> None:
    left: list[float] = []
    answers = False

    async def note(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        return await (answering if answers else never)(request, context)

    async def due(in_ms: int) -> CallAnswer:
        return await caller(msgspec.structs.replace(CALL, deadline_us=time.monotonic_ns() // 1000 + in_ms * 1000))

    caller = await make(FakeGateway(note), timeout_s=600.0)

    said = await due(300)
    assert "UNAVAILABLE" == said.error_code
    assert "not answered in time" in said.error

    # Of the first one a gateway may have heard nothing in its time.
    answers = True
    assert "" == (await due(60_000)).error_code
    # gRPC rounds it up. The client alone would give ten minutes.
    assert 0 < left[-1] < 100


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
async def test_how_long_a_call_may_take_is_no_matter_of_the_gateways_clock(ahead_s: int, make: Make) -> None:
    left: list[float] = []

    async def note(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        return await answering(request, context)

    at_gateway_ms = (time.time_ns() // 1_000_000) + ahead_s * 1000
    asked = InferMessage(
        "b", "1", "", 0, (), arrived_ns=at_gateway_ms * 1_000_000, call="c", deadline_ms=at_gateway_ms + 60_000
    )
    origin = Origin.of(asked, "c", time.monotonic_ns() // 1000)
    caller = await make(FakeGateway(note), timeout_s=600.0)

    answer = await caller(msgspec.structs.replace(CALL, deadline_us=origin.deadline_us))

    assert "" == answer.error_code
    # gRPC rounds it up. The client alone would give ten minutes.
    assert 0 < left[0] < 100


async def test_a_call_that_is_given_up_is_cancelled_at_its_gateway(make: Make) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            over.set()

    caller = await make(FakeGateway(wait))
    future = await caller.start(CALL)
    await begun.wait()
    future.cancel()

    await asyncio.wait_for(over.wait(), 60)


async def test_calls_to_one_sequence_are_made_one_after_the_other(make: Make) -> None:
    running: list[str] = []
    most: list[int] = []
    side_by_side = asyncio.Event()
    side_by_side.set()

    async def slow(request: Any, context: Any) -> Any:
        running.append(request.id)
        most.append(len(running))
        await asyncio.sleep(0.05)
        if len(running) > 1:
            side_by_side.set()
        await side_by_side.wait()
        running.remove(request.id)
        return answer(request)

    gateway = FakeGateway(slow)
    caller = await make(gateway)
    names = [f"call-{number}" for number in range(4)]
    calls = [msgspec.structs.replace(CALL, number=number, name=name) for number, name in enumerate(names)]

    for future in [await caller.start(call) for call in calls]:
        await asyncio.wrap_future(future)
    assert (names, [1] * 4) == ([request.id for request in gateway.requests], most)

    side_by_side.clear()
    apart = [msgspec.structs.replace(call, correlation_id=call.number + 1) for call in calls]
    for future in [await caller.start(call) for call in apart]:
        await asyncio.wrap_future(future)
    assert 1 < max(most)


async def test_behind_a_call_that_is_given_up_none_is_made_that_its_step_has_issued(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the step runs again, the first one would come behind the others."""
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.2)

    async def refusing_the_first(request: Any, context: Any) -> Any:
        return await (refusing(UNAVAILABLE) if request.id == "call-0" else answering)(request, context)

    caller = await make(FakeGateway(refusing_the_first))
    chains = [("b#1",), ("b#1",), ("b#1",), ("b#2",), ("b",)]
    calls = [
        msgspec.structs.replace(CALL, number=number, name=f"call-{number}", chain=chain)
        for number, chain in enumerate(chains)
    ]
    futures = [await caller.start(call) for call in calls]

    said = [(await asyncio.wrap_future(future)).error for future in futures]

    behind = "a call before it to the same sequence of model 'sum' was given up"
    assert [behind, behind, "", ""] == said[1:]
    assert "" == (await caller(calls[1])).error


async def test_a_call_can_be_failed_and_those_that_are_open_at_the_end_are(make: Make) -> None:
    caller = await make(FakeGateway(never))
    victim = await caller.start(CALL)
    last = await caller.start(msgspec.structs.replace(CALL, number=2, correlation_id=3))
    await asyncio.sleep(0.1)

    caller.client.fail(1, "deadlock")
    caller.client.fail(77, "nobody's")
    assert CallAnswer(error_code="UNAVAILABLE", error="deadlock") == await asyncio.wrap_future(victim)
    await caller.client.close()
    assert "the executor stops" == (await asyncio.wrap_future(last)).error
    assert "the executor stops" == (await caller()).error


async def test_a_refusal_that_comes_too_late_is_not_that_of_the_streams_next_response(make: Make) -> None:
    client = (await make(FakeGateway(never))).client

    async def answered_nevertheless() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return "the answer"

    first = asyncio.create_task(client.bounded(CALL, answered_nevertheless()))
    await asyncio.sleep(0)
    client.fail(CALL.number, "deadlock")
    assert "the answer" == await first
    following = asyncio.create_task(client.bounded(CALL, asyncio.sleep(600)))
    await asyncio.sleep(0)
    following.cancel()

    with pytest.raises(asyncio.CancelledError):
        await following


async def test_a_call_whose_gateway_is_lost_while_it_is_encoded_goes_through_another_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await make(FakeGateway(answering), FakeGateway(answering))
    gateways, loop = caller.client._gateways, asyncio.get_running_loop()

    async def lose() -> None:
        gateways.lost(await gateways.current())
        await asyncio.sleep(0)  # its channel takes no further call from here on

    def lost_meanwhile(call: ModelCall, first_answer: int = 0) -> bytes:
        asyncio.run_coroutine_threadsafe(lose(), loop).result()
        return request_of(call, first_answer)

    monkeypatch.setattr(client_module, "BULKY_BYTES", 0)
    monkeypatch.setattr(client_module, "request_of", lost_meanwhile)

    assert "" == (await caller()).error
    stream = await asyncio.to_thread(caller.client.stream, CALL)
    first = await asyncio.wrap_future(stream.read())
    assert first is not None
    assert "" == first.error


class EndlessGateway(FakeGateway):
    """Answers a stream's request with one response after the other. over: the stream has ended"""

    def __init__(self) -> None:
        super().__init__(never)
        self.over = asyncio.Event()

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        request = await anext(aiter(requests))
        self.requests.append(request)
        try:
            while True:
                yield pb.ModelStreamInferResponse(infer_response=answer(request))
                await asyncio.sleep(0.001)
        finally:
            self.over.set()


async def test_a_stream_may_be_given_up_on_the_thread_of_the_loop(make: Make) -> None:
    """The collector of garbage runs on any thread."""
    gateway = EndlessGateway()
    caller = await make(gateway)
    stream = await asyncio.to_thread(caller.client.stream, CALL)
    await asyncio.wrap_future(stream.read())

    stream.cancel()

    await asyncio.wait_for(gateway.over.wait(), 60)


async def test_a_stream_that_is_given_up_before_its_gateway_is_asked_is_never_asked_for(make: Make) -> None:
    """Nobody would read its responses, nor end it."""
    gateway, reached = EndlessGateway(), threading.Event()
    caller = await make(gateway)

    def hold() -> None:
        """The loop does nothing until both are said."""
        reached.wait()

    def give_up_at_once() -> Future[CallAnswer | None]:
        caller.client.soon(hold)
        stream = caller.client.stream(CALL)
        stream.cancel()
        reached.set()
        return stream.read()

    assert await asyncio.wrap_future(await asyncio.to_thread(give_up_at_once)) is None
    assert [] == gateway.requests


@pytest.mark.parametrize("responses", [0, 1])
async def test_a_thread_that_reads_a_stream_which_another_one_gives_up_finds_its_end(
    make: Make, responses: int
) -> None:
    begun = asyncio.Event()

    class Waiting(FakeGateway):
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            request = await anext(aiter(requests))
            for _ in range(responses):
                yield pb.ModelStreamInferResponse(infer_response=answer(request))
            begun.set()
            await asyncio.sleep(600)

    caller = await make(Waiting(never))
    stream = await asyncio.to_thread(caller.client.stream, CALL)
    for _ in range(responses):
        await asyncio.wrap_future(stream.read())
    reading = await asyncio.to_thread(stream.read)
    await begun.wait()

    stream.cancel()

    assert await asyncio.wrap_future(reading) is None


@pytest.mark.parametrize(("ends", "expected"), [("is given up", [None]), ("is lost", ["", "", ""])])
async def test_a_stream_that_is_over_before_its_end_is_sent_has_ended_as_any_other(
    make: Make, monkeypatch: pytest.MonkeyPatch, ends: str, expected: list[str | None]
) -> None:
    class Call(StreamStreamCall):
        async def done_writing(self) -> None:
            if over:
                await super().done_writing()
                return
            over.append(ends)
            if ends == "is given up":
                opened.wait()
                streams[0].cancel()
            else:
                await lost.server.stop(None)
            raise grpc.aio.InternalError("execute_batch")  # as it does for an RPC that is over

    over: list[str] = []
    streams, opened = list[Stream](), threading.Event()
    monkeypatch.setattr("grpc.aio._channel.StreamStreamCall", Call)
    monkeypatch.setattr("random.choice", itemgetter(0))
    lost = FakeGateway(never)
    caller = await make(lost, FakeGateway(never))

    def open_stream() -> None:
        streams.append(caller.client.stream(CALL))
        opened.set()

    await asyncio.to_thread(open_stream)
    heard = [await asyncio.wrap_future(await asyncio.to_thread(streams[0].read)) for _ in expected]

    assert expected == [one and one.error for one in heard]
    assert [ends] == over


async def test_a_stream_that_a_gateway_refuses_before_the_request_is_sent_goes_through_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC tells then that it could not send, and not why."""

    class Full(Servicer):
        def ModelStreamInfer(self, requests: Any, context: Any) -> None:  # noqa: N802
            refused.set()
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)

    def late(*arguments: Any) -> Any:
        """The loop stands still meanwhile."""
        if not refused.is_set():
            assert refused.wait(60)
            time.sleep(0.5)
        return serialize(*arguments)

    refused, aio_call = threading.Event(), cast("Any", grpc.aio)._call
    serialize = aio_call._common.serialize
    monkeypatch.setattr(aio_call._common, "serialize", late)
    monkeypatch.setattr("random.choice", itemgetter(0))
    with ThreadPoolExecutor(1) as threads:
        server: Any = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Full(), server)
        full: Any = SimpleNamespace(address=f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        living = FakeGateway(never)
        await living.server.start()
        caller = Caller([full, living])
        stream = await asyncio.to_thread(caller.client.stream, CALL)
        answers = [await asyncio.wrap_future(await asyncio.to_thread(stream.read)) for _ in range(3)]
        await caller.client.close()
        await living.server.stop(None)
        server.stop(None)

    assert [""] * 3 == [one.error for one in answers if one is not None]


async def test_a_stream_of_responses(make: Make) -> None:
    caller = await make(FakeGateway(never))

    def responses() -> list[CallAnswer]:
        stream = caller.client.stream(CALL)
        return list(iter(lambda: stream.read().result(), None))  # pyright: ignore[reportArgumentType]

    assert ["", "", ""] == [one.error_code for one in await asyncio.to_thread(responses)]


def test_gateways_on_this_machine_come_first_and_the_loopback_of_others_is_no_address() -> None:
    def line(host: str, grpc_address: str) -> ServiceLine:
        return ServiceLine("gateway", "g", "1", "1", 0, host, grpc_address)

    here = socket.gethostname()
    lines = [
        line("elsewhere", "grpc://10.0.0.7:8001"),
        line("elsewhere", "grpc://127.0.0.1:8001"),
        line("elsewhere", "grpcs://[::1]:8001"),
        line(here, "grpc://127.0.0.1:8011"),
        line(here, ""),
    ]

    assert ["grpc://127.0.0.1:8011", "grpc://10.0.0.7:8001"] == call_addresses(lines)
