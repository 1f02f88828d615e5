"""The v2 protocol over HTTP as bytes: routes, statuses and messages, and every form of a tensor.

Rows of the tables give status and message as a real Triton 2.51 says them. Where the mesh says something else, a row
names that too; why stands beside it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as blocking_client
import tritonclient.http.aio as http_aio

from deploy.local.embedded import held_port
from shared.contract.errors import Code
from tests.conformance.calls import Caller, Step, fresh_id, refused
from tests.conformance.targets import Target, is_live
from tests.groups import Shared
from tests.mesh.running_mesh import wait

NO_MEMBER = "attempt to access non-existing object member"
NO_TEXT = "attempt to access JSON non-string as string"
NO_BOOL = "attempt to access JSON non-boolean as boolean"
NO_ARRAY = "attempt to access JSON non-array as array"
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_SIGNED = "attempt to access JSON non-signed-integer as signed-integer"
NO_NUMBER = "attempt to access JSON non-number as double"
ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)
WRONG_COUNT = "Unable to parse 'data': Shape does not match true shape of 'data' field"
UNNAMED = "[request id: <id_unknown>]"
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
HEADER_LENGTH = "Inference-Header-Content-Length"
ALONE = "/v2/models/stateless/infer"
TENSORS = "/v2/models/tensors/infer"
DIRECT = "/v2/models/direct/infer"


@dataclass(frozen=True)
class Case:
    """A request and its refusal.

    mesh  (status, text) where the mesh refuses with other words
    """

    body: Any
    status: int
    message: str
    path: str = ALONE
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    mesh: tuple[int, str] | None = None


def one(name: str = "INPUT", datatype: str = "INT32", shape: Any = (1, 1), **rest: Any) -> dict[str, Any]:
    """An input of one element."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **({"data": [1]} | rest)}


def without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def body(*inputs: Any, **rest: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **rest}


def of(name: str, datatype: str, data: Any, shape: Any = (1, 1)) -> dict[str, Any]:
    return body(one(name, datatype, shape, data=data))


def asking(**parameters: Any) -> dict[str, Any]:
    return body(one(), outputs=[{"name": "OUTPUT", "parameters": parameters}])


def step(**parameters: Any) -> dict[str, Any]:
    return body(one(), parameters={"sequence_id": 1, "sequence_start": True, "sequence_end": True} | parameters)


def binary(size: Any, shape: Any = (1, 2), **rest: Any) -> bytes:
    made = without(one(shape=shape, parameters={"binary_data_size": size}), "data")
    return json.dumps(body(made, **rest)).encode()


def blob(size: int, content: bytes, shape: Any = (1, 2)) -> dict[str, Any]:
    """Body and headers of a binary input."""
    head = binary(size, shape)
    return {"body": head + content, "headers": {HEADER_LENGTH: str(len(head))}}


BROKEN = "failed to parse the request JSON buffer:"
FORM: dict[str, Case] = {
    "no JSON": Case(b"{not json", 500, f"{BROKEN} Missing a name for object member. at 1"),
    "no value": Case(b'{"inputs":x}', 500, f"{BROKEN} Invalid value. at 10"),
    "no colon": Case(b'{"inputs" 1}', 500, f"{BROKEN} Missing a colon after a name of object member. at 10"),
    "no comma": Case(b'{"inputs":[1 2]}', 500, f"{BROKEN} Missing a comma or ']' after an array element. at 13"),
    "no literal": Case(b'{"inputs":tree}', 500, f"{BROKEN} Invalid value. at 1"),
    "no escape": Case(b'{"inputs":"\\x"}', 500, f"{BROKEN} Invalid escape character in string. at 11"),
    "half a pair": Case(b'{"inputs":"\\ud800"}', 500, f"{BROKEN} The surrogate pair in string is invalid. at 11"),
    "open arrays": Case(b"[" * 200, 500, f"{BROKEN} Invalid value. at "),
    "two documents": Case(b"{} {}", 500, f"{BROKEN} The document root must not be followed by other values. at 3"),
    "endless number": Case(b'{"x":1e400}', 500, f"{BROKEN} Number too big to be stored in double. at 5"),
    "no inputs": Case({}, 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
    "no object": Case(b"[]", 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
    "inputs no array": Case({"inputs": 3}, 500, f"Unable to parse 'inputs': {NO_ARRAY}"),
    "input no object": Case({"inputs": [3]}, 400, f"{ONE_SOURCE} no field is set"),
    "id no text": Case(body(one(), id=3), 500, f"Unable to parse 'id': {NO_TEXT}"),
    "parameters no object": Case(
        body(one(), parameters=[]), 500, "failed to get request params.: attempt to get members for non-object"
    ),
    "outputs no array": Case(body(one(), outputs=3), 500, f"Unable to parse 'outputs': {NO_ARRAY}"),
    "output no object": Case(body(one(), outputs=[3]), 500, f"Unable to parse 'name': {NO_MEMBER} 'name'"),
    "no name": Case(body(without(one(), "name")), 500, f"Unable to parse 'name': {NO_MEMBER} 'name'"),
    "name no text": Case(body(one() | {"name": 3}), 500, f"Unable to parse 'name': {NO_TEXT}"),
    "no datatype": Case(body(without(one(), "datatype")), 500, f"Unable to parse 'datatype': {NO_MEMBER} 'datatype'"),
    "unknown datatype": Case(body(one(datatype="FP31")), 400, "invalid datatype for input INPUT"),
    "no shape": Case(body(without(one(), "shape")), 500, f"Unable to parse 'shape': {NO_MEMBER} 'shape'"),
    "shape no array": Case(body(one() | {"shape": 3}), 500, f"Unable to parse 'shape': {NO_ARRAY}"),
    "negative dim": Case(body(one(shape=(1, -1))), 500, f"Unable to parse 'shape': {NO_UNSIGNED}"),
    "fractional dim": Case(body(one(shape=(1, 1.0))), 500, f"Unable to parse 'shape': {NO_UNSIGNED}"),
    "no data": Case(body(without(one(), "data")), 400, f"{ONE_SOURCE} no field is set"),
    "data twice": Case(
        body(one(parameters={"binary_data_size": 4})), 400, f"{ONE_SOURCE} set 'data' 'binary_data_size'"
    ),
    "data thrice": Case(
        body(one(parameters={"binary_data_size": 4, "shared_memory_region": "r"})),
        400,
        f"{ONE_SOURCE} set 'data' 'binary_data_size' 'shared_memory_region'",
    ),
    "data no array": Case(body(one(data=3)), 500, f"Unable to parse 'data': {NO_ARRAY}"),
    "size no number": Case(binary("4"), 500, f"Unable to parse 'binary_data_size': {NO_UNSIGNED}"),
    "input in shared memory": Case(
        body(without(one(parameters={"shared_memory_region": "r"}), "data")),
        404,
        "Unable to find shared memory region: 'r'",
    ),
    "output in shared memory": Case(asking(shared_memory_region="r"), 404, "Unable to find shared memory region: 'r'"),
    "classes in shared memory": Case(
        asking(shared_memory_region="r", classification=1),
        400,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    "binary in shared memory": Case(
        asking(shared_memory_region="r", binary_data=True),
        400,
        "Output can't set both 'shared_memory_region' and 'binary_data'",
    ),
    "binary no bool": Case(asking(binary_data=1), 500, f"Unable to parse 'binary_data': {NO_BOOL}"),
    "classes no number": Case(asking(classification=-1), 500, f"Unable to set 'classification': {NO_UNSIGNED}"),
}

ELEMENTS: dict[str, Case] = {
    "too few": Case(body(one(shape=(1, 3))), 500, WRONG_COUNT),
    "too many": Case(body(one(data=[1, 2])), 500, WRONG_COUNT),
    "text for a number": Case(of("FLOAT", "FP32", ["1"]), 500, f"Unable to parse 'data': {NO_NUMBER}", TENSORS),
    "bool for a number": Case(of("DOUBLE", "FP64", [True]), 500, f"Unable to parse 'data': {NO_NUMBER}", TENSORS),
    "object for a number": Case(of("FLOAT", "FP32", [{}]), 500, f"Unable to parse 'data': {NO_NUMBER}", TENSORS),
    "fraction for an integer": Case(body(one(data=[1.5])), 500, f"Unable to parse 'data': {NO_SIGNED}"),
    "float for an integer": Case(body(one(data=[1.0])), 500, f"Unable to parse 'data': {NO_SIGNED}"),
    "bool for an integer": Case(of("LONG", "INT64", [True]), 500, f"Unable to parse 'data': {NO_SIGNED}", TENSORS),
    "more than int64": Case(of("LONG", "INT64", [2**63]), 500, f"Unable to parse 'data': {NO_SIGNED}", TENSORS),
    "negative for unsigned": Case(of("SMALL", "UINT8", [-1]), 500, f"Unable to parse 'data': {NO_UNSIGNED}", TENSORS),
    "more than uint64": Case(of("LARGE", "UINT64", [2**64]), 500, f"Unable to parse 'data': {NO_UNSIGNED}", TENSORS),
    "text for a bool": Case(of("FLAG", "BOOL", ["true"]), 500, f"Unable to parse 'data': {NO_BOOL}", TENSORS),
    "2 for a bool": Case(of("FLAG", "BOOL", [2]), 500, f"Unable to parse 'data': {NO_BOOL}", TENSORS),
    "number for a text": Case(of("TEXT", "BYTES", [1]), 500, f"Unable to parse JSON bytes array: {NO_TEXT}", TENSORS),
    "half floats": Case(
        of("HALF", "FP16", [1]),
        400,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input HALF",
        TENSORS,
    ),
    "brain floats": Case(
        of("HALF", "BF16", [1]),
        400,
        "receiving BF16 data via JSON is not supported. Please use the binary data format for input HALF",
        TENSORS,
    ),
    "too many texts": Case(
        of("TEXT", "BYTES", ["a", "b"]),
        400,
        f"{UNNAMED} unexpected number of string elements 2 for inference input 'TEXT' for model 'tensors', expecting 1",
        TENSORS,
    ),
    "too few texts": Case(
        of("TEXT", "BYTES", ["a", "b"], (1, 3)),
        400,
        f"{UNNAMED} expected 3 string elements for inference input 'TEXT' for model 'tensors', got 2",
        TENSORS,
    ),
}

BINARY: dict[str, Case] = {
    "too short": Case(
        **blob(8, bytes(7)),
        status=400,
        message="unexpected size for input 'INPUT', expecting 1 additional bytes for model 'stateless'",
    ),
    "too long": Case(**blob(8, bytes(9)), status=400, message="unexpected additional input data for model 'stateless'"),
    "not the shape's": Case(
        **blob(8, bytes(8), (1, 3)),
        status=400,
        message=f"{UNNAMED} input byte size mismatch for input 'INPUT' for model 'stateless'. Expected 12, got 8",
    ),
    "header beyond the body": Case(
        b"{}", 400, "inference header size should be in range (0, 2), got: 3", ALONE, {HEADER_LENGTH: "3"}
    ),
    "negative header": Case(
        b"{}", 400, "inference header size should be in range (0, 2), got: -1", ALONE, {HEADER_LENGTH: "-1"}
    ),
    "raw of a part of an element": Case(
        b"abc",
        400,
        f"{UNNAMED} input byte size mismatch for input 'raw_input' for model 'stateless'. Expected 0, got 3",
        ALONE,
        {HEADER_LENGTH: "0"},
    ),
    "raw for a model of nine inputs": Case(
        b"abcd",
        400,
        f"{UNNAMED} Raw request must only have 1 input (found 1) to be deduced but got 9 inputs in 'tensors' model "
        "configuration",
        TENSORS,
        {HEADER_LENGTH: "0"},
    ),
    "unknown encoding": Case(b"{}", 501, "Unsupported compression type", ALONE, {"Content-Encoding": "br"}),
}

PARAMETERS: dict[str, Case] = {
    "reserved": Case(
        body(one(), parameters={"triton_x": 1}),
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    "reserved, over HTTP without exception": Case(
        body(one(), parameters={"triton_enable_empty_final_response": True}),
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    "list": Case(
        body(one(), parameters={"x": [1]}),
        400,
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    "null": Case(
        body(one(), parameters={"x": None}),
        400,
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    "negative priority": Case(step(priority=-1), 500, f"Unable to parse 'priority': {NO_UNSIGNED}"),
    "textual timeout": Case(step(timeout="1"), 500, f"Unable to parse 'timeout': {NO_UNSIGNED}"),
    "numeric flag": Case(step(sequence_start=1), 500, f"Unable to parse 'sequence_start': {NO_BOOL}"),
    "textual flag": Case(step(sequence_end="x"), 500, f"Unable to parse 'sequence_end': {NO_BOOL}"),
    "numeric form": Case(step(binary_data_output=1), 500, f"Unable to parse 'binary_data_output': {NO_BOOL}"),
    "negative id": Case(step(sequence_id=-1), 500, f"Unable to parse 'sequence_id': {NO_TEXT}"),
    "fractional id": Case(step(sequence_id=1.5), 500, f"Unable to parse 'sequence_id': {NO_TEXT}"),
    "endless id": Case(step(sequence_id=2**64), 500, f"Unable to parse 'sequence_id': {NO_TEXT}"),
    "long id": Case(step(sequence_id="x" * 129), 501, "string correlation ID cannot be longer than 128 characters"),
    "long id of few letters": Case(
        step(sequence_id="ä" * 65), 501, "string correlation ID cannot be longer than 128 characters"
    ),
    "no id": Case(
        step(sequence_id=0),
        400,
        "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
        DIRECT,
    ),
    "no START": Case(
        step(sequence_id=999_999_001, sequence_start=False),
        400,
        "inference request for sequence 999999001 to model 'direct' must specify the START flag on the first request "
        "of the sequence",
        DIRECT,
    ),
    "batch in a sequence": Case(
        step() | body(one(shape=(2, 1), data=[1, 2])),
        400,
        "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher",
        DIRECT,
    ),
}

NORMALISATION: dict[str, Case] = {
    "unknown model": Case(b"{", 404, "Request for unknown model: 'nobody' is not found", "/v2/models/nobody/infer"),
    "unknown version": Case(
        body(one()),
        404,
        "Request for unknown model: 'stateless' version 9 is not found",
        "/v2/models/stateless/versions/9/infer",
    ),
    "endless version": Case(
        body(one()),
        400,
        f"failed to get model version from specified version string '{'9' * 20}' (details: stol), version should be an "
        "integral value > 0",
        f"/v2/models/stateless/versions/{'9' * 20}/infer",
    ),
    "no input": Case(
        body(),
        400,
        f"{UNNAMED} expected 1 inputs but got 0 inputs for model 'stateless'. Got input(s) [], but missing required "
        "input(s) ['INPUT']. Please provide all required input(s).",
    ),
    "other input": Case(body(one("X")), 400, "unexpected inference input 'X' for model 'stateless'"),
    "input twice": Case(body(one(), one(), id="r7"), 400, "[request id: r7] input 'INPUT' already exists in request"),
    "input twice, once with its data": Case(
        body(one(), without(one(parameters={"binary_data_size": 4}), "data"), id="r7"),
        400,
        "[request id: r7] input 'INPUT' already exists in request",
    ),
    "other output": Case(
        body(one(), outputs=[{"name": "X"}]), 400, "unexpected inference output 'X' for model 'stateless'"
    ),
    "datatype": Case(
        body(one(datatype="INT64"), id="r7"),
        400,
        "[request id: r7] inference input 'INPUT' data-type is 'INT64', but model 'stateless' expects 'INT32'",
    ),
    "rank": Case(
        body(one(shape=(1, 1, 1))),
        400,
        f"{UNNAMED} unexpected shape for input 'INPUT' for model 'stateless'. Expected [-1,-1], got [1,1,1]. "
        + BATCH_NOTE,
    ),
    "no batch dimension": Case(
        body(one(shape=())),
        400,
        f"{UNNAMED} input 'INPUT' has no shape but model requires batch dimension for 'stateless'",
    ),
    "no batch dimension, with data": Case(
        body(one(shape=(), data=[1, 2])),
        400,
        f"{UNNAMED} input 'INPUT' has no shape but model requires batch dimension for 'stateless'",
    ),
    "batch too large": Case(
        body(one(shape=(5, 1), data=[0] * 5)),
        400,
        f"{UNNAMED} inference request batch-size must be <= 4 for 'stateless'",
    ),
    "class of a bool": Case(
        of("FLAG", "BOOL", [True]) | {"outputs": [{"name": "FLAG_ECHO", "parameters": {"classification": 1}}]},
        400,
        "class result not available for output due to unsupported type 'BOOL'",
        TENSORS,
    ),
    "half floats out": Case(
        of("HALF", "FP16", [], (1, 0)) | {"outputs": [{"name": "HALF_ECHO"}]},
        400,
        "sending FP16 data via JSON is not supported. Please use the binary data format for output",
        TENSORS,
    ),
}


@pytest.fixture(scope="module")
def second_address(shared_target: Shared[Target]) -> Iterator[str]:
    """Where a gateway of the same mesh listens that parses HTTP with Hypercorn."""
    target = shared_target.get()
    assert target.mesh is not None
    host, port = target.mesh.state.host, held_port(target.mesh.state.host)
    ports = [f"--host={host}", f"--http-port={port}", "--grpc-port=0", "--metrics-port=0"]
    with target.mesh.spare("gateway", "hypercorn", "--http-parser=hypercorn", *ports):
        wait(lambda: is_live(f"{host}:{port}"), "the second gateway is live")
        yield f"{host}:{port}"


@pytest.fixture(params=["llhttp", "hypercorn"])
def target(request: pytest.FixtureRequest, target: Target) -> Target:
    """The shared target, by each way in which a mesh parses HTTP."""
    if request.param == "llhttp":
        return target
    if not target.is_mesh:
        pytest.skip("Triton has one way")
    return replace(target, http=request.getfixturevalue("second_address"))


@pytest.fixture
async def http(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{target.http}") as session:
        yield session


async def ask(
    http: aiohttp.ClientSession, method: str, path: str, content: Any = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of an answer."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    async with http.request(method, path, data=data, headers=headers or {}) as response:
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize(
    "table",
    [FORM, ELEMENTS, BINARY, PARAMETERS, NORMALISATION],
    ids=["form", "elements", "binary", "parameters", "normalisation"],
)
@pytest.mark.differs("shared memory has no meaning between machines")
async def test_every_wrong_request_is_refused_in_the_same_words(
    http: aiohttp.ClientSession, target: Target, table: dict[str, Case]
) -> None:
    wrong: list[str] = []
    for story, case in table.items():
        status, _, content = await ask(http, "POST", case.path, case.body, case.headers)
        error = json.loads(content).get("error", "")
        expected = case.mesh if target.is_mesh and case.mesh else (case.status, case.message)
        if (expected[0], expected[1]) != (status, error[: len(expected[1])]):
            wrong.append(f"{story}: expected {expected}, found {(status, error)}")
        good, _, _ = await ask(http, "POST", ALONE, body(one()))
        if good != 200:
            wrong.append(f"{story}: the next request got {good}")

    assert not wrong, "\n".join(wrong)


@pytest.mark.mesh_only("Triton cuts the upper bits off; a wrong number is worse than an error")
async def test_integers_that_their_datatype_cannot_hold_are_refused(http: aiohttp.ClientSession) -> None:
    status, _, content = await ask(http, "POST", TENSORS, of("SMALL", "UINT8", [300]))

    error = "Unable to parse 'data': an element of input 'SMALL' is out of the range of UINT8"
    assert (400, {"error": error}) == (status, json.loads(content))


@pytest.mark.mesh_only("in 2.51 bools are bools alone, and the nesting has no limit")
async def test_what_newer_releases_read_and_refuse(http: aiohttp.ClientSession) -> None:
    """Bools may be 0 and 1; a document is nested at most 100 deep."""
    status, _, content = await ask(http, "POST", TENSORS, of("FLAG", "BOOL", [0, 1, True], (1, 3)))
    assert (200, [False, True, True]) == (status, json.loads(content)["outputs"][0]["data"])

    status, _, content = await ask(http, "POST", ALONE, b'{"inputs":' + b"[" * 100 + b"]" * 100 + b"}")
    assert (400, {"error": "JSON nesting depth exceeds maximum allowed limit (100)"}) == (status, json.loads(content))


NOT_FOUND, NOT_ALLOWED = (404, "Not Found"), (405, "Method Not Allowed")
ROUTES: list[tuple[str, str, tuple[int, str | None]]] = [
    ("GET", "/v2", (200, None)),
    ("GET", "/v2/", NOT_FOUND),
    ("GET", "/", NOT_FOUND),
    ("GET", "/v2/models", NOT_FOUND),
    ("GET", "/v2/health/live?x=1", (200, None)),
    ("GET", "/v2/health/ready", (200, None)),
    ("GET", "/v2/health/other", NOT_FOUND),
    ("PUT", "/v2/health/live", NOT_ALLOWED),
    ("POST", "/v2", NOT_ALLOWED),
    ("GET", "/v2/models/stateless", (200, None)),
    ("GET", "/v2/models/stateless/versions/1", (200, None)),
    ("GET", "/v2/models/stateless/", NOT_FOUND),
    ("GET", "/v2/models/stateless/versions/x", NOT_FOUND),
    ("GET", "/v2/models/stateless/versions/2", (404, "Request for unknown model: 'stateless' version 2 is not found")),
    ("GET", "/v2/models/nobody", (404, "Request for unknown model: 'nobody' is not found")),
    ("GET", "/v2/models/stateless/ready", (200, None)),
    ("GET", "/v2/models/stateless/versions/7/ready", (400, "Model version not ready")),
    ("GET", "/v2/models/nobody/ready", (400, "Model version not ready")),
    ("GET", "/v2/models/stats/ready", (400, "Model version not ready")),
    ("GET", "/v2/models/stateless/config", (200, None)),
    ("GET", "/v2/models/nobody/config", (404, "Request for unknown model: 'nobody' is not found")),
    ("GET", "/v2/models/stats", (200, None)),
    ("GET", "/v2/models/stateless/stats", (200, None)),
    ("GET", "/v2/models/nobody/stats", (400, "requested model 'nobody' is not available")),
    (
        "GET",
        "/v2/models/stateless/versions/2/stats",
        (400, "requested model version is not available for model 'stateless'"),
    ),
    ("GET", "/v2/models/stateless/infer", NOT_ALLOWED),
    ("GET", "/v2/models/stateless/generate", NOT_ALLOWED),
    ("GET", "/v2/models/stateless/generate_stream", NOT_ALLOWED),
    ("POST", "/v2/models/nobody/generate", (404, "Request for unknown model: 'nobody' is not found")),
    ("GET", "/v2/models/stateless/other", NOT_FOUND),
    ("POST", "/v2/repository/index", (200, None)),
    ("POST", "/v2/repository/any/index", (200, None)),
    ("GET", "/v2/repository/index", NOT_ALLOWED),
    ("GET", "/v2/repository/models/stateless/load", NOT_ALLOWED),
    ("POST", "/v2/repository/models/stateless/other", NOT_FOUND),
    ("POST", "/v2/repository/any/models/stateless/load", (501, "'repository_name' specification is not supported")),
    ("POST", "/v2/repository/any/models/stateless/unload", (501, "'repository_name' specification is not supported")),
    ("GET", "/v2/models/stateless/versions/1/trace/setting", NOT_FOUND),
    ("GET", "/v2/systemsharedmemory/status", (200, None)),
    ("GET", "/v2/cudasharedmemory/status", (200, None)),
    ("POST", "/v2/systemsharedmemory/unregister", (200, None)),
    ("POST", "/v2/cudasharedmemory/unregister", (200, None)),
    ("GET", "/v2/systemsharedmemory/region/r/status", (404, "Unable to find system shared memory region: 'r'")),
    ("GET", "/v2/cudasharedmemory/region/r/status", (404, "Unable to find cuda shared memory region: 'r'")),
    ("POST", "/v2/systemsharedmemory/status", NOT_ALLOWED),
    ("GET", "/v2/cudasharedmemory/region/r/register", NOT_ALLOWED),
    ("PATCH", "/v2/nowhere", NOT_FOUND),
]


async def test_every_route_answers_its_methods_and_no_other(http: aiohttp.ClientSession) -> None:
    wrong: list[str] = []
    for method, path, (expected, error) in ROUTES:
        status, _, content = await ask(http, method, path)
        if status != expected or (error is not None and json.loads(content) != {"error": error}):
            wrong.append(f"{method} {path}: expected {expected} {error}, found {status} {content!r}")

    assert not wrong, "\n".join(wrong)


@pytest.mark.differs("the bodies of the Open Inference Protocol, which KServe's client reads")
async def test_health_has_a_body(target: Target, http: aiohttp.ClientSession) -> None:
    for path, told in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/stateless/ready", {"name": "stateless", "ready": True}),
        ("/v2/models/stateless/versions/1/ready", {"name": "stateless", "ready": True}),
    ):
        status, _, content = await ask(http, "GET", path)

        assert 200 == status
        assert (told if target.is_mesh else None) == (json.loads(content) if content else None), path


@pytest.mark.mesh_only("what a mesh cannot mean, or not yet")
async def test_what_is_not_served_is_refused_by_name(http: aiohttp.ClientSession) -> None:
    for path, reason in (
        (
            "/v2/cudasharedmemory/region/r/register",
            "failed to register CUDA shared memory region: 'r', GPUs not supported",
        ),
    ):
        status, _, content = await ask(http, "POST", path, {})

        assert 501 == status, path
        assert json.loads(content)["error"].startswith(reason), path


async def test_the_form_of_an_answer(http: aiohttp.ClientSession) -> None:
    """JSON data is flat; binary data follows the JSON, whose length a header gives unless there is no byte of it."""
    request = of("SMALL", "UINT8", [[1, [2]], 3, 4], (2, 2)) | {"id": "r1", "model_name": "ignored"}
    status, headers, content = await ask(http, "POST", TENSORS, request)
    assert (200, "application/json") == (status, headers["Content-Type"])
    output = {"name": "SMALL_ECHO", "datatype": "UINT8", "shape": [2, 2]}
    expected = {"id": "r1", "model_name": "tensors", "model_version": "1", "outputs": [output | {"data": [1, 2, 3, 4]}]}
    assert expected == json.loads(content)

    _, headers, content = await ask(http, "POST", TENSORS, request | {"parameters": {"binary_data_output": True}})
    length = int(headers[HEADER_LENGTH])
    assert "application/octet-stream" == headers["Content-Type"]
    assert [output | {"parameters": {"binary_data_size": 4}}] == json.loads(content[:length])["outputs"]
    assert b"\1\2\3\4" == content[length:]

    # An output that is listed goes by its own flag alone.
    listed = request | {"parameters": {"binary_data_output": True}, "outputs": [{"name": "SMALL_ECHO"}]}
    _, headers, content = await ask(http, "POST", TENSORS, listed)
    assert HEADER_LENGTH not in headers
    assert [1, 2, 3, 4] == json.loads(content)["outputs"][0]["data"]

    empty = of("SMALL", "UINT8", [], (1, 0)) | {"parameters": {"binary_data_output": True}}
    _, headers, content = await ask(http, "POST", TENSORS, empty)
    assert (HEADER_LENGTH in headers, headers["Content-Type"]) == (False, "application/json")
    assert {"binary_data_size": 0} == json.loads(content)["outputs"][0]["parameters"]


async def test_a_body_without_json_is_the_only_input(http: aiohttp.ClientSession) -> None:
    content = np.arange(3, dtype=np.int32).tobytes()
    status, headers, answer = await ask(http, "POST", ALONE, content, {HEADER_LENGTH: "0"})
    length = int(headers[HEADER_LENGTH])
    (output, *_) = json.loads(answer[:length])["outputs"]

    assert (200, [1, 3], {"binary_data_size": 12}) == (status, output["shape"], output["parameters"])
    assert content == answer[length : length + 12]


async def test_numbers_that_json_lacks_are_read_and_written(http: aiohttp.ClientSession) -> None:
    numbers = [float("nan"), float("inf"), float("-inf"), 0.5, -0.0]
    _, _, content = await ask(http, "POST", TENSORS, of("DOUBLE", "FP64", numbers, (1, 5)))

    np.testing.assert_array_equal(numbers, json.loads(content)["outputs"][0]["data"])


async def test_a_document_may_begin_with_a_byte_order_mark(http: aiohttp.ClientSession) -> None:
    status, _, content = await ask(http, "POST", ALONE, json.dumps(body(one(data=[5]))).encode("utf-8-sig"))

    assert (200, [5]) == (status, json.loads(content)["outputs"][0]["data"])


async def test_a_number_of_fp32_is_written_exactly(http: aiohttp.ClientSession) -> None:
    """A client that reads doubles gets the number that the model gave, and not one close to it."""
    numbers = np.array([2**31, 2**32, 123456792, 1e22, 0.1, 1e-45, 0.5], np.float32).tolist()
    _, _, content = await ask(http, "POST", TENSORS, of("FLOAT", "FP32", numbers, (1, 7)))
    assert numbers == json.loads(content)["outputs"][0]["data"]

    _, _, content = await ask(http, "POST", "/v2/models/tensors/generate", {"FLOAT": 123456792})
    assert 123456792 == json.loads(content)["FLOAT_ECHO"]


async def test_an_output_that_is_asked_for_twice_comes_once_in_its_first_form(http: aiohttp.ClientSession) -> None:
    plain = {"name": "OUTPUT"}
    for form in ({"classification": 1}, {"binary_data": True}):
        asked = body(one(data=[5]), outputs=[plain, plain | {"parameters": form}])
        status, _, content = await ask(http, "POST", ALONE, asked)

        output = {"name": "OUTPUT", "datatype": "INT32", "shape": [1, 1], "data": [5]}
        assert (200, [output]) == (status, json.loads(content)["outputs"])

    asked = body(one(data=[5]), outputs=[plain | {"parameters": {"classification": 1}}, plain])
    _, _, content = await ask(http, "POST", ALONE, asked)
    assert ["5:0"] == json.loads(content)["outputs"][0]["data"]


@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_bodies_may_be_compressed_both_ways(http: aiohttp.ClientSession, name: str) -> None:
    plain = json.dumps(body(one())).encode()
    packed = gzip.compress(plain) if name == "gzip" else zlib.compress(plain)
    headers = {"Content-Encoding": name, "Accept-Encoding": f"identity;q=0.5, {name};q=0.9, br"}

    status, answered, content = await ask(http, "POST", ALONE, packed, headers)
    assert (200, name) == (status, answered["Content-Encoding"])
    # aiohttp has unpacked it.
    assert [1] == json.loads(content)["outputs"][0]["data"]

    # Nothing but answers of inference is compressed.
    _, answered, _ = await ask(http, "POST", ALONE, {}, {"Accept-Encoding": name})
    assert "Content-Encoding" not in answered


def test_the_encodings_are_named_when_another_was_used(target: Target) -> None:
    async def other() -> tuple[int, str]:
        async with aiohttp.ClientSession(f"http://{target.http}") as http:
            status, headers, _ = await ask(http, "POST", ALONE, body(one()), {"Content-Encoding": "br"})
            return status, headers["Accept-Encoding"]

    assert (501, "gzip, deflate") == asyncio.run(other())


def tensor(name: str, array: Any, datatype: str, **form: Any) -> Any:
    made = http_aio.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **form)
    return made


async def test_classes_have_values_indexes_and_names(target: Target) -> None:
    """Six decimals whatever the size, largest first, equal ones by index; a class without a name has none."""
    scores = np.array([[0.5, 2, 3.25, -1e10], [1, 1, 1, 1]], np.float32)
    async with http_aio.InferenceServerClient(target.http) as client:
        answers: list[Any] = [
            await client.infer(
                "labelled",
                [tensor("SCORES", scores, "FP32")],
                outputs=[http_aio.InferRequestedOutput("SCORES_ECHO", class_count=count, binary_data=form)],
            )
            for count, form in ((9, True), (3, False))
        ]

    expected = [
        ["3.250000:2", "2.000000:1:dog", "0.500000:0:cat", "-10000000000.000000:3:bird"],
        ["1.000000:0:cat", "1.000000:1:dog", "1.000000:2", "1.000000:3:bird"],
    ]
    binary_form, json_form = (answer.as_numpy("SCORES_ECHO").tolist() for answer in answers)
    assert expected == [[element.decode() for element in row] for row in binary_form]
    assert [row[:3] for row in expected] == json_form


@pytest.mark.mesh_only("responses of Triton 2.51's python backend have no parameters; those of later releases do")
async def test_parameters_of_a_response_reach_the_caller(caller: Caller) -> None:
    told = {"text": "zwei", "number": -3, "flag": True, "part": 0.5}
    step = Step(fresh_id(), start=True, end=True, model="direct", parameters={"tell": json.dumps(told)})

    assert told == (await caller.infer(step)).parameters
    with refused(Code.INTERNAL, "response parameter 'x' has invalid type"):
        await caller.of("stateless").infer(Step(parameters={"tell": '{"x": [1]}'}))


async def test_parameters_of_a_request_reach_the_model(target: Target) -> None:
    parameters = {"text": "zwei", "number": -3, "flag": True, "part": 0.5}
    async with http_aio.InferenceServerClient(target.http) as client:
        answer: Any = await client.infer(
            "stateless", [tensor("INPUT", np.array([[1]], np.int32), "INT32")], parameters=parameters
        )

    seen = json.loads(answer.as_numpy("SEEN").item())
    assert parameters == seen["rows"][0]["parameters"]


def blocking_tensor(name: str, array: Any, datatype: str, **form: Any) -> Any:
    made = blocking_client.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **form)
    return made


def test_tensors_of_tens_of_megabytes_go_in_and_come_out(target: Target) -> None:
    """Twenty million bytes, at once with small requests; a million numbers as JSON."""
    large = np.random.default_rng(1).integers(0, 255, (1, 20_000_000), dtype=np.uint8)
    part = large[:, :1_000_000]
    with blocking_client.InferenceServerClient(
        target.http, concurrency=4, connection_timeout=120, network_timeout=120
    ) as client:
        whole = client.async_infer("tensors", [blocking_tensor("SMALL", large, "UINT8")])
        small = [
            client.async_infer("stateless", [blocking_tensor("INPUT", np.array([[value]], np.int32), "INT32")])
            for value in range(16)
        ]
        values: list[Any] = [each.get_result().as_numpy("OUTPUT") for each in small]
        returned: Any = whole.get_result()
        listed: Any = client.infer(
            "tensors",
            [blocking_tensor("SMALL", part, "UINT8", binary_data=False)],
            outputs=[blocking_client.InferRequestedOutput("SMALL_ECHO", binary_data=False)],
        )

    assert list(range(16)) == [value.item() for value in values]
    assert np.array_equal(large, returned.as_numpy("SMALL_ECHO"))
    assert np.array_equal(part, listed.as_numpy("SMALL_ECHO"))


def test_the_blocking_client_waits_for_many_at_once(target: Target) -> None:
    with blocking_client.InferenceServerClient(target.http, concurrency=8) as client:
        waiting: list[Any] = []
        for value in range(32):
            number = blocking_tensor("INPUT", np.array([[value]], np.int32), "INT32")
            waiting.append(client.async_infer("stateless", [number]))
        results: list[Any] = [each.get_result() for each in waiting]

    assert list(range(32)) == [int(result.as_numpy("OUTPUT").item()) for result in results]


async def test_a_client_that_leaves_in_the_middle_harms_nobody(target: Target, http: aiohttp.ClientSession) -> None:
    """Left within the headers, within the body, and with the answer under way; a sequence goes on meanwhile."""
    host, _, port = target.http.partition(":")
    whole = json.dumps(body(one())).encode()
    head = f"POST {ALONE} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(whole)}\r\n\r\n".encode()
    sequence, sums = fresh_id(), list[int]()
    for index, sent in enumerate((head[:20], head + whole[:10], head + whole, b"\0" * 100)):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await writer.drain()
        writer.close()
        flags = {"sequence_id": sequence, "sequence_start": index == 0, "sequence_end": index == 3}
        _, _, content = await ask(http, "POST", DIRECT, body(one(), parameters=flags))
        sums.append(json.loads(content)["outputs"][0]["data"][0])

    assert [1, 2, 3, 4] == sums
