"""What a client or a model does wrong concerns nobody else: the neighbours' sums stay right, no slot is lost.

Every case is tried while other sequences of the same model run, and is followed by the same sequence going on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.mesh import raw_http
from tests.mesh.raw_http import answer, infer_document, posted, send
from tests.mesh.running_mesh import RunningMesh, eventually
from tests.mesh.traffic import Call, Callers, Plan, Step, Traffic, make_plans

MODEL = "moody_sum"
INFER = f"/v2/models/{MODEL}/infer"
JSON_LENGTH = "Inference-Header-Content-Length"

pb: Any = service_pb2
"""The generated messages have no types."""


@asynccontextmanager
async def neighbours(mesh: RunningMesh, chance: random.Random) -> AsyncGenerator[None]:
    """Sequences of the same model that run meanwhile; each of their answers must come and be right.

    Afterwards every slot can be used, all at the same time.
    """
    plans = make_plans(chance, 5, shortest=60, longest=80)
    positive = [Plan(plan.id, tuple(map(abs, plan.values))) for plan in plans]
    async with Callers(mesh) as callers:
        async with asyncio.TaskGroup() as group:
            traffic = Traffic(MODEL, callers, positive, chance, pause_s=0.002)
            group.create_task(traffic.run())
            await traffic.progress(0.05)
            yield
        await every_slot_is_free(mesh, callers[0])
    assert raw_http.get(mesh.http(), "/v2/health/live").status == HTTPStatus.OK


async def every_slot_is_free(mesh: RunningMesh, caller: Call) -> None:
    """Holds every slot of the model at the same time, then gives all of them back."""
    await eventually(lambda: mesh.slots_held(MODEL) == 0, "every slot is free again")
    names = [f"slot {number}" for number in range(mesh.slots(MODEL))]
    async with asyncio.timeout(60):
        await asyncio.gather(*(caller(MODEL, Step(name, 1, start=True)) for name in names))
        # With several shards one may be paged for another that begins in a shard without a spare slot.
        assert len(mesh.keys.shards) > 1 or len(names) == mesh.slots_held(MODEL)
        await asyncio.gather(*(caller(MODEL, Step(name, 1, end=True)) for name in names))


# -- clients ---------------------------------------------------------------------------------------------------------


def changed(value: int = 1, **fields: Any) -> dict[str, Any]:
    """A good request of the sequence "mistaken", with fields of its input changed."""
    document = infer_document(value, sequence_id="mistaken")
    document["inputs"][0].update(fields)
    return document


def binary(blob: bytes, claimed: int) -> tuple[bytes, dict[str, str]]:
    """A request whose input is binary: `claimed` bytes by its JSON, `blob` in truth."""
    document = changed(parameters={"binary_data_size": claimed})
    del document["inputs"][0]["data"]
    head = json.dumps(document).encode()
    return head + blob, {JSON_LENGTH: str(len(head))}


def with_inputs(*more: dict[str, Any]) -> dict[str, Any]:
    """A good request with further inputs."""
    document = changed()
    document["inputs"] += more
    return document


@dataclass(frozen=True)
class HttpMistake:
    """A wrong request: what is sent, and what must come back."""

    name: str
    body: Any
    status: int
    error: str
    path: str = INFER
    headers: dict[str, str] | None = None


def http_mistakes() -> list[HttpMistake]:
    """The table for HTTP."""
    truncated, truncated_headers = binary(b"\1\0", 4)
    surplus, surplus_headers = binary(b"\1\0\0\0\0", 4)
    return [
        HttpMistake("malformed JSON", b'{"inputs": [', 500, "failed to parse the request JSON buffer"),
        HttpMistake("no JSON object", b"[]", 500, "Unable to parse 'inputs'"),
        HttpMistake("no inputs", {"parameters": {"sequence_id": "mistaken"}}, 500, "Unable to parse 'inputs'"),
        HttpMistake("wrong dtype", changed(datatype="FP32"), 400, "data-type is 'FP32', but model 'moody_sum' expects"),
        HttpMistake("unknown dtype", changed(datatype="INT31"), 400, ""),
        HttpMistake("wrong shape", changed(shape=[1, 2], data=[1, 2]), 400, "unexpected shape for input 'INPUT'"),
        HttpMistake("batch of two", changed(shape=[2, 1], data=[1, 2]), 400, "must specify batch-size 1"),
        HttpMistake("very many dimensions", changed(shape=[9] * 100_000), 400, "100000 dimensions, of at most 64"),
        HttpMistake("too few elements", changed(shape=[1, 1], data=[]), 500, "Unable to parse 'data'"),
        HttpMistake("text as number", changed(data=["one"]), 500, "Unable to parse 'data'"),
        HttpMistake("truncated binary", truncated, 400, "unexpected size for input 'INPUT'", headers=truncated_headers),
        HttpMistake("surplus binary", surplus, 400, "unexpected additional input data", headers=surplus_headers),
        HttpMistake("header length beyond the body", b"{}", 400, "header size", headers={JSON_LENGTH: "3"}),
        HttpMistake("unknown model", changed(), 404, "unknown model: 'nobody'", "/v2/models/nobody/infer"),
        HttpMistake("unknown version", changed(), 404, "version 9", f"/v2/models/{MODEL}/versions/9/infer"),
        HttpMistake(
            "missing START",
            infer_document(1, sequence_id="never begun"),
            400,
            "must specify the START flag on the first",
        ),
        HttpMistake("no sequence id", infer_document(1), 400, "must specify a non-zero or non-empty correlation ID"),
        HttpMistake("negative sequence id", infer_document(1, sequence_id=-1), 500, "Unable to parse 'sequence_id'"),
        HttpMistake(
            "id over 128 characters", infer_document(1, sequence_id="x" * 129), 501, "cannot be longer than 128"
        ),
        HttpMistake(
            "control tensor",
            with_inputs({"name": "START", "shape": [1, 1], "datatype": "INT32", "data": [1]}),
            400,
            "unexpected inference input 'START' for model 'moody_sum'",
        ),
        HttpMistake("state tensor alone", changed(name="SUM_IN"), 400, "unexpected inference input 'SUM_IN'"),
        HttpMistake(
            "unknown output", {**changed(), "outputs": [{"name": "NOWHERE"}]}, 400, "unexpected inference output"
        ),
        HttpMistake(
            "state as output", {**changed(), "outputs": [{"name": "SUM_OUT"}]}, 400, "unexpected inference output"
        ),
        HttpMistake(
            "flags that are no booleans",
            infer_document(1, sequence_id=5, sequence_start="yes"),
            500,
            "Unable to parse 'sequence_start'",
        ),
        HttpMistake(
            "session and sequence differ", changed(), 400, "name one", headers={"Inference-Session-Id": "other"}
        ),
        HttpMistake(
            "session that is not UTF-8", changed(), 400, "not UTF-8", headers={"Inference-Session-Id": "f\xfcr"}
        ),
    ]


@pytest.mark.parametrize("mistake", http_mistakes(), ids=lambda mistake: mistake.name)
async def test_a_wrong_http_request_is_refused_and_its_sequence_goes_on(
    mesh: RunningMesh, mistake: HttpMistake
) -> None:
    begun = await posted(mesh.http(), INFER, infer_document(20, sequence_id="mistaken", sequence_start=True))
    assert 20 == answer(begun)
    body = mistake.body if isinstance(mistake.body, bytes) else json.dumps(mistake.body).encode()

    response = await asyncio.to_thread(send, mesh.http(1), "POST", mistake.path, body, mistake.headers)

    assert mistake.status == response.status, response.body
    assert mistake.error in response.error
    ended = await posted(mesh.http(), INFER, infer_document(3, sequence_id="mistaken", sequence_end=True))
    assert 23 == answer(ended)


async def test_wrong_http_requests_disturb_no_neighbour_and_hold_no_slot(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with neighbours(mesh, chance):
        for mistake in chance.sample(http_mistakes(), len(http_mistakes())):
            body = mistake.body if isinstance(mistake.body, bytes) else json.dumps(mistake.body).encode()
            response = await asyncio.to_thread(send, mesh.http(), "POST", mistake.path, body, mistake.headers)
            assert response.status >= HTTPStatus.BAD_REQUEST


def request(raw: bytes | None = struct.pack("<i", 1), parameters: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A request of the sequence "mistaken" as gRPC carries it. changes: of its input."""
    message = pb.ModelInferRequest(model_name=MODEL)
    tensor = message.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    for field, value in changes.items():
        if field == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, field, value)
    for name, value in {"sequence_id": "mistaken", **(parameters or {})}.items():
        kind = "bool_param" if isinstance(value, bool) else "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.parameters[name], kind, value)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def altered(message: Any, change: Callable[[Any], object]) -> Any:
    """The message after a change."""
    change(message)
    return message


GRPC_MISTAKES: list[tuple[str, Any, str, str]] = [
    ("wrong dtype", request(datatype="FP32"), "INVALID_ARGUMENT", "data-type is 'FP32', but model 'moody_sum' expects"),
    ("wrong shape", request(b"\0" * 8, shape=[1, 2]), "INVALID_ARGUMENT", "unexpected shape for input 'INPUT'"),
    ("very many dimensions", request(shape=[9] * 100_000), "INVALID_ARGUMENT", "100000 dimensions, of at most 64"),
    ("negative shape", request(shape=[1, -1]), "INVALID_ARGUMENT", ""),
    ("batch of two", request(b"\0" * 8, shape=[2, 1]), "INVALID_ARGUMENT", "must specify batch-size 1"),
    ("truncated binary", request(b"\1\0"), "INVALID_ARGUMENT", "byte size mismatch for input 'INPUT'"),
    ("surplus binary", request(b"\1\0\0\0\0"), "INVALID_ARGUMENT", "byte size mismatch for input 'INPUT'"),
    ("no data", request(None), "INVALID_ARGUMENT", ""),
    ("too much data", altered(request(), lambda m: m.raw_input_contents.append(b"\0\0\0\0")), "INVALID_ARGUMENT", ""),
    ("unknown model", altered(request(), lambda m: setattr(m, "model_name", "nobody")), "NOT_FOUND", "unknown model"),
    ("unknown version", altered(request(), lambda m: setattr(m, "model_version", "9")), "NOT_FOUND", "version 9"),
    ("no version", altered(request(), lambda m: setattr(m, "model_version", "x")), "INVALID_ARGUMENT", "version"),
    (
        "missing START",
        request(parameters={"sequence_id": "never begun"}),
        "INVALID_ARGUMENT",
        "START flag on the first",
    ),
    ("no sequence id", request(parameters={"sequence_id": ""}), "INVALID_ARGUMENT", "non-empty correlation ID"),
    ("id over 128 characters", request(parameters={"sequence_id": "x" * 129}), "UNIMPLEMENTED", "longer than 128"),
    (
        "control tensor",
        altered(
            request(),
            lambda m: (
                m.inputs.add(name="START", datatype="INT32", shape=[1, 1]),
                m.raw_input_contents.append(b"\1\0\0\0"),
            ),
        ),
        "INVALID_ARGUMENT",
        "unexpected inference input 'START'",
    ),
    ("state tensor alone", request(name="SUM_IN"), "INVALID_ARGUMENT", "unexpected inference input 'SUM_IN'"),
    (
        "unknown output",
        altered(request(), lambda m: m.outputs.add(name="NOWHERE")),
        "INVALID_ARGUMENT",
        "unexpected inference output 'NOWHERE'",
    ),
    ("flags that are no booleans", request(parameters={"sequence_start": "yes"}), "INVALID_ARGUMENT", "sequence_start"),
]


@pytest.mark.parametrize(
    ("message", "status", "error"), [case[1:] for case in GRPC_MISTAKES], ids=[case[0] for case in GRPC_MISTAKES]
)
async def test_a_wrong_grpc_request_is_refused_and_its_sequence_goes_on(
    mesh: RunningMesh, message: Any, status: str, error: str
) -> None:
    begun = await posted(mesh.http(), INFER, infer_document(20, sequence_id="mistaken", sequence_start=True))
    assert 20 == answer(begun)

    async with grpc.aio.insecure_channel(mesh.grpc(1)) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(message)

    assert status == refused.value.code().name
    assert error in str(refused.value.details())
    ended = await posted(mesh.http(), INFER, infer_document(3, sequence_id="mistaken", sequence_end=True))
    assert 23 == answer(ended)


async def test_wrong_requests_on_a_stream_take_their_place_in_the_order_and_disturb_no_neighbour(
    mesh: RunningMesh, chance: random.Random
) -> None:
    good = [
        request(parameters={"sequence_id": "good", "sequence_start": number == 0, "sequence_end": number == 19})
        for number in range(20)
    ]
    places = sorted(chance.sample(range(20 + len(GRPC_MISTAKES)), len(GRPC_MISTAKES)))
    mistakes = iter(case[1] for case in GRPC_MISTAKES)
    steps = iter(good)
    order = [next(mistakes) if place in places else next(steps) for place in range(20 + len(GRPC_MISTAKES))]

    async with neighbours(mesh, chance), grpc.aio.insecure_channel(mesh.grpc()) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [one async for one in stub.ModelStreamInfer(iter(order))]

    assert places == [place for place, one in enumerate(answers) if one.error_message]
    sums = [
        struct.unpack("<i", one.infer_response.raw_output_contents[0])[0] for one in answers if not one.error_message
    ]
    assert list(range(1, 21)) == sums


async def test_a_body_beyond_the_bound_is_refused_and_the_gateway_goes_on(mesh: RunningMesh) -> None:
    bound = 64 << 20
    head = f"POST {INFER} HTTP/1.1\r\nHost: {mesh.http()}\r\nContent-Length: {bound + 1}\r\n\r\n".encode()

    reader, writer = await asyncio.open_connection(*mesh.http().split(":"))
    writer.write(head)
    status = await asyncio.wait_for(reader.readline(), 30)
    writer.close()

    assert b"400" in status
    assert raw_http.get(mesh.http(), "/v2/health/live").status == HTTPStatus.OK


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST " + INFER.encode() + b" HTTP/1.1\r\nContent-Le", b"GET /v2 HTTP/1.1\r\nHost: here\r\n\r\n"],
    ids=["idle", "in the middle of a request", "with a response on its way"],
)
async def test_a_client_that_resets_its_connection_is_no_error_to_anybody(mesh: RunningMesh, sent: bytes) -> None:
    """The fixture sees to it that no process has logged a traceback."""
    host, port = mesh.http().split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.sendall(sent)
    await asyncio.sleep(0.05)
    # Without lingering, closing sends RST instead of FIN.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()

    assert HTTPStatus.OK == raw_http.get(mesh.http(), "/v2/health/live").status
    await asyncio.sleep(0.2)


# -- models ----------------------------------------------------------------------------------------------------------

MISBEHAVIOUR = {
    -1: ("INTERNAL", "Failed to process the request\\(s\\) for model .*this model does not like -1"),
    -2: ("INVALID_ARGUMENT", "not this number"),
    -3: ("INTERNAL", "OUTPUT"),
    -4: ("INTERNAL", "OUTPUT"),
    -5: ("INTERNAL", "Number of InferenceResponse objects do not match the number of InferenceRequest objects"),
    -6: ("INTERNAL", "SURPRISE"),
    -7: ("INTERNAL", "Expected a list in the execute return, found type"),
}
"""What models/moody_sum does wrong when it is sent such a number, and what its client must hear."""
HTTP_STATUS = {"INTERNAL": 500, "INVALID_ARGUMENT": 400}


def step(value: int, **parameters: Any) -> dict[str, Any]:
    """A step of the sequence "unlucky" that names the output it wants."""
    return {**infer_document(value, sequence_id="unlucky", **parameters), "outputs": [{"name": "OUTPUT"}]}


@pytest.mark.parametrize(("number", "expected"), MISBEHAVIOUR.items(), ids=str)
async def test_a_model_that_fails_at_one_step_leaves_its_sequence_and_its_neighbours_as_they_were(
    mesh: RunningMesh, chance: random.Random, number: int, expected: tuple[str, str]
) -> None:
    code, text = expected
    async with neighbours(mesh, chance):
        assert 10 == answer(await posted(mesh.http(), INFER, step(10, sequence_start=True)))
        for _ in range(5):
            failed = await posted(mesh.http(1), INFER, step(number))
            assert HTTP_STATUS[code] == failed.status
            assert_matches(text, failed.error)
        async with grpc.aio.insecure_channel(mesh.grpc()) as channel:
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            message = request(struct.pack("<i", number), {"sequence_id": "unlucky"})
            message.outputs.add(name="OUTPUT")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(message)
        assert code == refused.value.code().name
        assert_matches(text, str(refused.value.details()))
        assert 15 == answer(await posted(mesh.http(), INFER, step(5, sequence_end=True)))


async def test_a_sequence_whose_start_fails_in_the_model_is_over_and_can_be_started_again(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with neighbours(mesh, chance):
        failed = await posted(mesh.http(), INFER, step(-1, sequence_start=True))
        assert 500 == failed.status
        late = await posted(mesh.http(), INFER, step(1))
        assert (400, "failed") == (late.status, late.document["reason"])
        assert 4 == answer(await posted(mesh.http(), INFER, step(4, sequence_start=True)))
        assert 5 == answer(await posted(mesh.http(), INFER, step(1, sequence_end=True)))


async def test_a_sequence_whose_end_fails_in_the_model_is_over_and_its_slot_is_free(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with neighbours(mesh, chance):
        assert 4 == answer(await posted(mesh.http(), INFER, step(4, sequence_start=True)))
        failed = await posted(mesh.http(), INFER, step(-1, sequence_end=True))
        assert 500 == failed.status
        late = await posted(mesh.http(), INFER, step(1))
        assert (400, "ended") == (late.status, late.document["reason"])


async def test_failing_steps_of_many_sequences_at_once_each_fail_alone(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with Callers(mesh) as callers:

        async def play(number: int) -> None:
            total = 0
            for position in range(20):
                bad = position > 0 and chance.random() < 0.3
                value = chance.choice([-1, -2, -3, -4, -5, -6, -7]) if bad else position
                one = Step(f"many {number}", value, start=position == 0)
                try:
                    total += value
                    assert total == await chance.choice(callers)(MODEL, one)
                    assert not bad
                except InferenceServerException:
                    assert bad, one
                    total -= value
            assert total == await callers[0](MODEL, Step(f"many {number}", 0, end=True))

        async with asyncio.TaskGroup() as group:
            for number in range(mesh.slots(MODEL)):
                group.create_task(play(number))
        await every_slot_is_free(mesh, callers[0])


def assert_matches(pattern: str, text: str) -> None:
    """Fails, showing the text, when it does not match."""
    assert re.search(pattern, text, re.DOTALL), text
