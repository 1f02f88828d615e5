"""Bad input over HTTP: the status and the words of Triton, and a gateway that goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
from typing import Any

import aiohttp
import pytest

from gateway.requests.regions import DISABLED
from gateway.rest import receiver
from gateway.settings import GatewaySettings
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running
from tests.gateway.one_at_a_time import one_at_a_time

SUM = "/v2/models/running_sum/infer"
ECHO = "/v2/models/echo/infer"
ADD_SUB = "/v2/models/add_sub/infer"


def one(name: str = "INPUT", datatype: str = "INT32", shape: Any = (1, 1), **rest: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **({"data": [1]} | rest)}


def body(*inputs: Any, **rest: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **rest}


def steps(**parameters: Any) -> dict[str, Any]:
    return body(one(), parameters={"sequence_id": 1, "sequence_start": True} | parameters)


FOUR: dict[str, Any] = {"shape": [1, 4], "data": [1, 2, 3, 4], "datatype": "INT32"}
EIGHT: dict[str, Any] = {"shape": [2, 4], "data": [0] * 8}

NO_MEMBER = "attempt to access non-existing object member"
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


def output(**parameters: Any) -> dict[str, Any]:
    return body(one("INPUT0", "FP32"), outputs=[{"name": "OUTPUT0", "parameters": parameters}])


TABLE: list[tuple[str, str, Any, int, str]] = [
    ("no JSON", ECHO, b"{not json", 500, "failed to parse the request JSON buffer"),
    ("no object", ECHO, b"[]", 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
    ("no inputs", ECHO, {}, 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
    (
        "inputs no array",
        ECHO,
        {"inputs": 3},
        500,
        "Unable to parse 'inputs': attempt to access JSON non-array as array",
    ),
    ("input no object", ECHO, {"inputs": [3]}, 400, "But no field is set"),
    ("input without name", ECHO, body({"data": [1]}), 500, f"Unable to parse 'name': {NO_MEMBER} 'name'"),
    (
        "name no string",
        ECHO,
        body(one() | {"name": 3}),
        500,
        "Unable to parse 'name': attempt to access JSON non-string as string",
    ),
    ("no datatype", ECHO, body({"data": [1], "name": "x"}), 500, f"Unable to parse 'datatype': {NO_MEMBER} 'datatype'"),
    ("unknown datatype", ECHO, body(one("INPUT0", "FP31")), 400, "invalid datatype for input INPUT0"),
    ("id no string", ECHO, body(one(), id=3), 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    (
        "parameters no object",
        ECHO,
        body(one(), parameters=[]),
        500,
        "failed to get request params.: attempt to get members for non-object",
    ),
    ("negative dim", ECHO, body(one("INPUT0", "FP32", (1, -1))), 500, f"Unable to parse 'shape': {NO_UNSIGNED}"),
    ("fractional dim", ECHO, body(one("INPUT0", "FP32", (1, 1.0))), 500, f"Unable to parse 'shape': {NO_UNSIGNED}"),
    ("endless dim", ECHO, body(one("INPUT0", "FP32", (0, 2**63))), 400, "Unable to parse 'shape'"),
    ("outputs no array", ECHO, body(one("INPUT0", "FP32"), outputs=3), 500, "Unable to parse 'outputs'"),
    (
        "output without name",
        ECHO,
        body(one("INPUT0", "FP32"), outputs=[{}]),
        500,
        f"Unable to parse 'name': {NO_MEMBER} 'name'",
    ),
    ("classes no number", ECHO, output(classification=-1), 500, f"Unable to set 'classification': {NO_UNSIGNED}"),
    (
        "binary no bool",
        ECHO,
        output(binary_data=1),
        500,
        "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "classes in shared memory",
        ECHO,
        output(shared_memory_region="r", classification=1),
        400,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    (
        "binary in shared memory",
        ECHO,
        output(shared_memory_region="r", binary_data=True),
        400,
        "Output can't set both 'shared_memory_region' and 'binary_data'",
    ),
    ("offset without a region", ECHO, output(shared_memory_offset=-1), 500, f"'shared_memory_offset': {NO_UNSIGNED}"),
    ("size without a region", ECHO, output(shared_memory_byte_size="4"), 500, f"byte_size': {NO_UNSIGNED}"),
    (
        "offset of an input without a region",
        ECHO,
        body(one() | {"parameters": {"shared_memory_offset": True}}),
        500,
        f"Unable to parse 'shared_memory_offset': {NO_UNSIGNED}",
    ),
    ("output in shared memory", ECHO, output(shared_memory_region="r", shared_memory_byte_size=4), 501, DISABLED),
    ("deep nesting", ECHO, b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}", 400, "maximum allowed limit (100)"),
    ("very deep nesting", ECHO, b"[" * 5000, 400, ""),
    ("half floats", "/v2/models/echo_half/infer", body(one("INPUT0", "FP16")), 400, "receiving FP16 data via JSON"),
    ("count", ECHO, body(one("INPUT0", "FP32", (1, 3))), 500, "Shape does not match true shape of 'data' field"),
    (
        "text as number",
        ECHO,
        body(one("INPUT0", "FP32", data=["1"])),
        500,
        "attempt to access JSON non-number as double",
    ),
    (
        "fraction as integer",
        SUM,
        body(one(data=[1.5])),
        500,
        "attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        "bool as integer",
        SUM,
        body(one(data=[True])),
        500,
        "attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        "beyond 64 bits",
        SUM,
        body(one(data=[2**63])),
        500,
        "attempt to access JSON non-signed-integer as signed-integer",
    ),
    ("data no array", SUM, body(one(data=1)), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
    (
        "number as bool",
        "/v2/models/echo_bool/infer",
        body(one("INPUT0", "BOOL", data=[2])),
        500,
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "number as text",
        "/v2/models/echo_text/infer",
        body(one("INPUT0", "BYTES", data=[2])),
        500,
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    ),
    (
        "too many texts",
        "/v2/models/echo_text/infer",
        body(one("INPUT0", "BYTES", data=["a", "b"])),
        400,
        "unexpected number of string elements 2 for inference input 'INPUT0' for model 'echo_text', expecting 1",
    ),
    ("out of range", SUM, body(one(data=[2**31])), 400, "out of the range of INT32"),
    ("no data", ECHO, body({"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}), 400, "But no field is set"),
    (
        "both data",
        ECHO,
        body(one("INPUT0", "FP32", parameters={"binary_data_size": 4})),
        400,
        "must set only one of the following fields",
    ),
    (
        "shared memory",
        ECHO,
        body({"name": "INPUT0", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r"}}),
        501,
        DISABLED,
    ),
    ("reserved", ECHO, body(one("INPUT0", "FP32"), parameters={"triton_x": 1}), 400, "reserved for Triton usage"),
    ("parameter type", ECHO, body(one("INPUT0", "FP32"), parameters={"x": [1]}), 400, "parameter 'x' has invalid type"),
    ("unknown model", "/v2/models/nobody/infer", body(one()), 404, "Request for unknown model: 'nobody' is not found"),
    ("unknown version", "/v2/models/echo/versions/9/infer", body(one()), 404, "'echo' version 9 is not found"),
    ("endless version", f"/v2/models/echo/versions/{'9' * 5000}/infer", body(one()), 400, "(details: stol)"),
    ("version 0", "/v2/models/echo/versions/0/infer", body(one()), 404, "'echo' version 0 is not found"),
    ("version -1", "/v2/models/echo/versions/-1/infer", body(one()), 404, "Not Found"),
    ("wrong dtype", SUM, steps() | body(one(datatype="INT64")), 400, "data-type is 'INT64', but model 'running_sum'"),
    ("wrong shape", ECHO, body(one("INPUT0", "FP32", (1, 1, 1))), 400, "Expected [-1,-1], got [1,1,1]. NOTE: Setting"),
    ("no batch dim", ECHO, body(one("INPUT0", "FP32", ())), 400, "has no shape but model requires batch dimension"),
    ("batch too large", ECHO, body(one("INPUT0", "FP32", (9, 1), data=[0] * 9)), 400, "batch-size must be <= 8"),
    (
        "missing input",
        ADD_SUB,
        body(one("INPUT0", **FOUR)),
        400,
        (
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) "
            "['INPUT0'], but missing required input(s) ['INPUT1']. Please provide all required input(s)."
        ),
    ),
    (
        "unexpected input",
        ADD_SUB,
        body(one("INPUT0", **FOUR), one("OTHER", **FOUR)),
        400,
        "unexpected inference input 'OTHER' for model 'add_sub'",
    ),
    (
        "duplicate input",
        ADD_SUB,
        body(one("INPUT0", **FOUR), one("INPUT0", **FOUR)),
        400,
        "[request id: <id_unknown>] input 'INPUT0' already exists in request",
    ),
    (
        "batch mismatch",
        ADD_SUB,
        body(one("INPUT0", **FOUR), one("INPUT1", **(FOUR | EIGHT))),
        400,
        "input 'INPUT1' batch size does not match other inputs for 'add_sub'",
    ),
    (
        "unknown output",
        ECHO,
        body(one("INPUT0", "FP32"), outputs=[{"name": "NOPE"}]),
        400,
        "unexpected inference output 'NOPE' for model 'echo'",
    ),
    (
        "request id in message",
        ECHO,
        body(one("INPUT0", "INT32"), id="r7"),
        400,
        "[request id: r7] inference input 'INPUT0' data-type is 'INT32'",
    ),
    ("no id", SUM, body(one()), 400, "must specify a non-zero or non-empty correlation ID"),
    ("id 0", SUM, steps(sequence_id=0), 400, "must specify a non-zero or non-empty correlation ID"),
    ("empty id", SUM, steps(sequence_id=""), 400, "must specify a non-zero or non-empty correlation ID"),
    ("negative id", SUM, steps(sequence_id=-1), 500, "Unable to parse 'sequence_id'"),
    ("fractional id", SUM, steps(sequence_id=1.5), 500, "Unable to parse 'sequence_id'"),
    ("long id", SUM, steps(sequence_id="x" * 129), 501, "string correlation ID cannot be longer than 128 characters"),
    ("long id of few letters", SUM, steps(sequence_id="ä" * 65), 501, "cannot be longer than 128 characters"),
    ("start no bool", SUM, steps(sequence_start=1), 500, "Unable to parse 'sequence_start'"),
    ("priority no number", SUM, steps(priority=-1), 500, f"Unable to parse 'priority': {NO_UNSIGNED}"),
    ("timeout no number", SUM, steps(timeout="1"), 500, f"Unable to parse 'timeout': {NO_UNSIGNED}"),
    ("unknown model and broken body", "/v2/models/nobody/infer", b"{", 404, "Request for unknown model: 'nobody'"),
    ("decoupled model and broken body", "/v2/models/echo_many/infer", b"{", 501, "HTTP end point doesn't support"),
    (
        "no START",
        SUM,
        steps(sequence_id=99, sequence_start=False),
        400,
        (
            "inference request for sequence 99 to model 'running_sum' must specify the START flag on the first request "
            "of the sequence"
        ),
    ),
    (
        "batch in a sequence",
        SUM,
        steps() | body(one(shape=(2, 1), data=[1, 2])),
        400,
        "inference request to model 'running_sum' must specify batch-size 1 due to requirements of sequence batcher",
    ),
    (
        "control tensor",
        SUM,
        steps() | body(one(), one("START")),
        400,
        "unexpected inference input 'START' for model 'running_sum'",
    ),
    (
        "control tensor instead of the input",
        SUM,
        steps() | body(one("START")),
        400,
        "unexpected inference input 'START' for model 'running_sum'",
    ),
    ("model raises", SUM, steps(sequence_id=66) | body(one(data=[-666])), 500, "the model does not like -666"),
]


@pytest.fixture
async def session(gateway: RunningGateway):
    async with aiohttp.ClientSession(f"http://{gateway.url}") as made:
        yield made


async def post(session: aiohttp.ClientSession, path: str, content: Any, **headers: str) -> tuple[int, Any]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    async with session.post(path, data=data, headers={k.replace("_", "-"): v for k, v in headers.items()}) as response:
        return response.status, await response.json()


async def test_every_bad_request_gets_its_message_and_the_next_good_one_is_served(session: aiohttp.ClientSession):
    """The table above, each against the same gateway: status, `error`, nothing else broken."""
    for story, path, content, status, message in TABLE:
        got, document = await post(session, path, content)

        assert (story, got) == (story, status), document
        assert message in document["error"], story
        assert (await post(session, ECHO, body(one("INPUT0", "FP32"))))[0] == 200, story


async def test_missing_start_says_whether_the_sequence_was_there_before(session: aiohttp.ClientSession):
    await post(session, SUM, steps(sequence_id=8))
    await post(session, SUM, steps(sequence_id=8, sequence_start=False, sequence_end=True))

    status, document = await post(session, SUM, steps(sequence_id=8, sequence_start=False))

    assert status == 400
    assert document["error"].startswith(
        "inference request for sequence 8 to model 'running_sum' must specify the START"
    )
    assert document["error"].endswith("(the sequence has ended; its last step was 2)")
    assert (document["reason"], document["last_step"]) == ("ended", 2)


BINARY = body({"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}})


@pytest.mark.parametrize(
    ("blob", "length", "status", "message"),
    [
        (bytes(8), None, 200, ""),
        (bytes(7), None, 400, "unexpected size for input 'INPUT0', expecting 1 additional bytes for model 'echo'"),
        (bytes(9), None, 400, "unexpected additional input data for model 'echo'"),
        (bytes(8), "9999999", 400, "inference header size should be in range (0, "),
        (bytes(8), "x", 400, "Unable to parse Inference-Header-Content-Length, got: x"),
        (bytes(8), "-1", 400, "inference header size should be in range (0, "),
        (bytes(8), "9" * 5000, 400, "Unable to parse Inference-Header-Content-Length"),
        (bytes(8), "5", 500, "failed to parse the request JSON buffer"),
    ],
)
async def test_binary_data_of_the_wrong_size_is_refused(
    session: aiohttp.ClientSession, blob: bytes, length: Any, status: int, message: str
):
    head = json.dumps(BINARY).encode()

    got, document = await post(session, ECHO, head + blob, Inference_Header_Content_Length=length or str(len(head)))

    assert got == status
    assert message in document.get("error", "")


@pytest.mark.parametrize("many", [1 << 18, 0], ids=["few", "many"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x01\x00\x00\x00a", ""),
        (b"\x05\x00\x00\x00a", "incomplete string data"),
        (b"\x01\x00", "incomplete string length indicator"),
        (b"", "expected 1 string elements for inference input 'INPUT0' for model 'echo_text', got 0"),
        (b"\x01\x00\x00\x00a\x00\x00\x00\x00", "unexpected number of string elements 2"),
    ],
)
async def test_structure_of_text_elements_is_checked(
    session: aiohttp.ClientSession, raw: bytes, message: str, many: int, monkeypatch: pytest.MonkeyPatch
):
    """Many are read by a thread, beforehand."""
    monkeypatch.setattr("gateway.requests.forms.STRINGS_BYTES_MAX", many)
    declared = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps(body(declared)).encode()

    status, document = await post(
        session, "/v2/models/echo_text/infer", head + raw, Inference_Header_Content_Length=str(len(head))
    )

    assert (status == 200) == (message == "")
    assert message in document.get("error", "")


async def test_many_strings_are_read_for_one_request_at_a_time(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.requests.forms.STRINGS_BYTES_MAX", 0)
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
    with one_at_a_time(monkeypatch, receiver, "with_strings_read") as readers:
        posts = [post(session, "/v2/models/echo_text/infer", body(tensor)) for _ in range(8)]
        assert [200] * 8 == [status for status, _ in await asyncio.gather(*posts)]

    assert 8 == len(readers)


async def test_byte_count_that_does_not_fit_the_shape_is_refused(session: aiohttp.ClientSession):
    declared = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 8}}
    head = json.dumps(body(declared)).encode()

    status, document = await post(session, ECHO, head + bytes(8), Inference_Header_Content_Length=str(len(head)))

    assert status == 400
    assert "input byte size mismatch for input 'INPUT0' for model 'echo'. Expected 12, got 8" in document["error"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_beyond_the_bound_is_refused_and_the_gateway_goes_on(
    gateway_settings: GatewaySettings, executor: FakeExecutor, chunked: bool
):
    settings = dataclasses.replace(gateway_settings, http_max_input_size=10_000)
    async with gateway_running(settings) as gateway, aiohttp.ClientSession(f"http://{gateway.url}") as session:

        async def parts() -> Any:
            for _ in range(20):
                yield bytes(1000)

        async with session.post(ECHO, data=parts() if chunked else bytes(20_000)) as response:
            status, document = response.status, await response.json()

        assert status == 400
        assert "exceeds the maximum allowed input size of 10000 bytes" in document["error"]
        assert (await post(session, ECHO, body(one("INPUT0", "FP32"))))[0] == 200


async def test_small_body_that_unpacks_beyond_the_bound_is_refused(
    gateway_settings: GatewaySettings, executor: FakeExecutor
):
    settings = dataclasses.replace(gateway_settings, http_max_input_size=100_000)
    async with gateway_running(settings) as gateway, aiohttp.ClientSession(f"http://{gateway.url}") as session:
        status, document = await post(session, ECHO, gzip.compress(bytes(50_000_000)), Content_Encoding="gzip")

    assert status == 400
    assert "exceeds the maximum allowed input size" in document["error"]


# The header of a gzip file has the time in it, and a test's name must be the same in every worker.
@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b"{}" * 100)[:-10]], ids=["other", "cut"])
async def test_broken_compression_is_refused(session: aiohttp.ClientSession, content: bytes):
    status, document = await post(session, ECHO, content, Content_Encoding="gzip")

    assert status == 400
    assert "failed to decompress the request body" in document["error"]


async def test_unknown_compression_names_the_known_ones(session: aiohttp.ClientSession):
    async with session.post(ECHO, data=b"{}", headers={"Content-Encoding": "br"}) as response:
        assert response.status == 501
        assert response.headers["Accept-Encoding"] == "gzip, deflate"
        assert await response.json() == {"error": "Unsupported compression type"}


async def test_clients_that_dawdle_hold_nobody_up(gateway: RunningGateway, session: aiohttp.ClientSession):
    """Many that have sent a part of a request, each another; then they go on, bit by bit, and are answered too."""
    content = json.dumps(body(one("INPUT0", "FP32"))).encode()
    head = f"POST {ECHO} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    whole = head + content
    parts = [whole[: len(head) // 2 + index] for index in range(30)]
    slow = [await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port) for _ in parts]
    for (_, writer), part in zip(slow, parts, strict=True):
        writer.write(part)

    assert (await post(session, ECHO, body(one("INPUT0", "FP32"))))[0] == 200

    for position in range(0, len(whole), 20):
        for (_, writer), part in zip(slow, parts, strict=True):
            writer.write(whole[len(part) :][position : position + 20])
            await writer.drain()
    answers = [await reader.read() for reader, _ in slow]
    for _, writer in slow:
        writer.close()
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"]
)
async def test_what_is_no_http_is_refused(gateway: RunningGateway, session: aiohttp.ClientSession, sent: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    writer.write(sent + b"\r\n" * 3)
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (await post(session, ECHO, body(one("INPUT0", "FP32"))))[0] == 200


async def test_a_bulky_document_is_read_and_answered(session: aiohttp.ClientSession):
    numbers = [float(number) for number in range(60_000)]
    status, document = await post(session, ECHO, body(one("INPUT0", "FP32", (1, len(numbers)), data=numbers)))

    assert (200, numbers) == (status, document["outputs"][0]["data"])


async def test_a_client_that_leaves_in_the_middle_of_its_body_disturbs_nobody(
    gateway: RunningGateway, session: aiohttp.ClientSession
):
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.addresses.http_port)
    writer.write(f"POST {ECHO} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    assert (await post(session, ECHO, body(one("INPUT0", "FP32"))))[0] == 200
