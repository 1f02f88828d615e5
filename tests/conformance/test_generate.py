"""generate and generate_stream: what becomes of JSON that is no tensor, and what an answer looks like."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.conformance.calls import fresh_id
from tests.conformance.targets import Target

MODELS = "/v2/models/"
STATED = {"model_name": "tensors", "model_version": "1"}
NO_SHAPE = "The schema can not convert input 'SCORES' to tensor with proper shape"
NO_OBJECT = "attempt to access JSON non-object as object"
NO_TEXT = "attempt to access JSON non-string as string"
NO_TYPE = "has invalid type. It should be either 'int', 'bool', or 'string'."
UNNAMED = "[request id: <id_unknown>]"
MISSING = (
    f"{UNNAMED} expected 1 inputs but got 0 inputs for model 'stateless'. Got input(s) [], but missing required "
    "input(s) ['INPUT']. Please provide all required input(s)."
)


@pytest.fixture
async def http(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{target.http}") as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str, document: Any, **headers: str) -> tuple[int, str, bytes]:
    """Status, content type and body of an answer."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    async with http.post(MODELS + path, data=data, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def events(content: bytes) -> list[Any]:
    """The documents of a stream of events."""
    *parts, rest = content.split(b"\n\n")
    assert (b"", True) == (rest, all(part.startswith(b"data: ") for part in parts))
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize(
    ("document", "outputs"),
    [
        ({"TEXT": "hi"}, {"TEXT_ECHO": "hi"}),
        ({"TEXT": ["a", "b"]}, {"TEXT_ECHO": ["a", "b"]}),
        ({"TEXT": []}, {"TEXT_ECHO": []}),
        ({"parameters": {"TEXT": "a"}}, {"TEXT_ECHO": "a"}),
        ({"FLOAT": 1.5, "SMALL": [1, 2, 3]}, None),
        ({"FLOAT": 3}, {"FLOAT_ECHO": 3.0}),
        ({"FLOAT": [1.5, 2]}, {"FLOAT_ECHO": [1.5, 2.0]}),
        ({"FLAG": [True, False]}, {"FLAG_ECHO": [True, False]}),
        ({"FLAG": True, "LONG": -7, "SMALL": 9}, {"FLAG_ECHO": True, "LONG_ECHO": -7, "SMALL_ECHO": 9}),
        ({"id": "r1", "TEXT": "a"}, {"TEXT_ECHO": "a", "id": "r1"}),
        ({"id": "", "TEXT": "a"}, {"TEXT_ECHO": "a"}),
        ({"TEXT": "a", "parameters": {"id": "r9"}}, {"TEXT_ECHO": "a"}),
    ],
)
async def test_keys_that_name_inputs_become_tensors(
    http: aiohttp.ClientSession, document: Any, outputs: dict[str, Any] | None
) -> None:
    """A scalar or a flat list; an output of one element is a scalar again. Both endpoints say the same."""
    status, kind, content = await ask(http, "tensors/generate", document)
    expected = STATED | (outputs if outputs is not None else {"FLOAT_ECHO": 1.5, "SMALL_ECHO": [1, 2, 3]})

    assert (200, "application/json", expected) == (status, kind, json.loads(content))

    status, kind, content = await ask(http, "tensors/generate_stream", document, accept="text/event-stream")
    assert (200, "text/event-stream; charset=utf-8", [expected]) == (status, kind, events(content))


async def test_a_float_that_json_does_not_have_is_read_and_written(http: aiohttp.ClientSession) -> None:
    _, _, content = await ask(http, "tensors/generate", b'{"FLOAT":NaN}')

    assert b'"FLOAT_ECHO":NaN' in content


@pytest.mark.parametrize(
    ("path", "document", "status", "error"),
    [
        ("labelled", {"SCORES": [1, 2, 3]}, 400, NO_SHAPE),
        ("labelled", {"SCORES": 1}, 400, NO_SHAPE),
        ("labelled", {"SCORES": [[1, 2], [3, 4]]}, 400, NO_SHAPE),
        ("tensors", {"TEXT": 1}, 500, f"Unable to parse JSON bytes array: {NO_TEXT}"),
        ("tensors", {"TEXT": {"a": 1}}, 500, f"Unable to parse JSON bytes array: {NO_TEXT}"),
        ("tensors", {"FLAG": "x"}, 500, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        ("tensors", {"LONG": 1.5}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ("tensors", {"HALF": 1}, 400, "receiving FP16 data via JSON is not supported."),
        ("tensors", {"TEXT": [["a", "b"], ["c"]]}, 400, f"{UNNAMED} unexpected number of string elements 3 for"),
        ("tensors", {"id": 7, "TEXT": "a"}, 500, f"Unable to parse 'id': {NO_TEXT}"),
        (
            "tensors",
            {"TEXT": "a", "parameters": 1},
            500,
            f"Expected JSON object for keyword: 'parameters': {NO_OBJECT}",
        ),
        (
            "tensors",
            {"TEXT": "a", "parameters": {"TEXT": "b"}},
            400,
            f"Converting keyword: 'parameters': {UNNAMED} input 'TEXT' already exists in request",
        ),
        (
            "tensors",
            {"TEXT": "a", "parameters": {"x": {}}},
            400,
            f"Converting keyword: 'parameters': parameter 'x' {NO_TYPE}",
        ),
        ("stateless", {"INPUT": 1, "e": {}}, 400, f"parameter 'e' {NO_TYPE}"),
        ("stateless", {"INPUT": 1, "e": None}, 400, f"parameter 'e' {NO_TYPE}"),
        ("stateless", {}, 400, MISSING),
        ("stateless", {"abc": 1}, 400, MISSING),
        ("stateless", [], 500, "attempt to get members for non-object"),
        ("stateless", b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("stateless", b'{"INPUT":}', 500, "failed to parse the request JSON buffer: Invalid value. at 9"),
        ("nobody", {}, 404, "Request for unknown model: 'nobody' is not found"),
        ("stateless/versions/2", {"INPUT": 1}, 404, "Request for unknown model: 'stateless' version 2 is not found"),
    ],
)
async def test_what_is_refused_before_the_inference_is_plain_json(
    http: aiohttp.ClientSession, path: str, document: Any, status: int, error: str
) -> None:
    for kind in ("generate", "generate_stream"):
        answered, form, content = await ask(http, f"{path}/{kind}", document)

        assert (status, "application/json") == (answered, form)
        assert error == json.loads(content)["error"][: len(error)]


async def test_a_packed_body_is_refused(http: aiohttp.ClientSession) -> None:
    for encoding in ("gzip", "br"):
        answer = await ask(http, "stateless/generate", {"INPUT": 1}, **{"content-encoding": encoding})

        assert (400, "Unsupported content-encoding, only 'identity' is supported.") == (
            answer[0],
            json.loads(answer[2])["error"],
        )


async def test_every_other_key_becomes_a_parameter(http: aiohttp.ClientSession) -> None:
    """Also those that mean something in a request of `infer`. A nested one counts after one before it."""
    document = {"INPUT": 1, "id": "r", "a": 1, "b": "x", "c": True, "d": 1.5, "triton_e": 2, "OUTPUT": 5}
    document |= {"sequence_id": 7, "sequence_start": 9, "priority": "x", "timeout": 5, "binary_data_output": True}
    _, _, content = await ask(http, "stateless/generate", document | {"parameters": {"a": 2, "big": 2**63}})

    (row,) = json.loads(json.loads(content)["SEEN"])["rows"]
    given = {key: value for key, value in document.items() if key != "INPUT"} | {"a": 2, "big": float(2**63)}
    assert (given, "r", 0) == (row["parameters"], row["request_id"], row["correlation_id"])


@pytest.mark.differs("2.51 answers every failing request of generate with 400, whatever the error's code")
async def test_a_models_error_is_the_first_event_with_its_status(http: aiohttp.ClientSession, target: Target) -> None:
    failed = 500 if target.is_mesh else 400
    status, kind, content = await ask(http, "stateless/generate", {"INPUT": 1, "fail": "no"})
    assert (failed, "application/json", {"error": "no"}) == (status, kind, json.loads(content))

    status, kind, content = await ask(http, "stateless/generate_stream", {"INPUT": 1, "fail": "no"})
    assert (failed, "text/event-stream; charset=utf-8", [{"error": "no"}]) == (status, kind, events(content))


@pytest.mark.mesh_only("there the controls of a sequence are plain parameters, so that no sequence model can be asked")
async def test_a_sequence_is_controlled_by_keys(http: aiohttp.ClientSession) -> None:
    controls = {"sequence_id": fresh_id()}
    begun = await ask(http, "direct/generate", {"INPUT": 1, "sequence_start": True} | controls)
    ended = await ask(http, "direct/generate_stream", {"INPUT": 2, "parameters": {"sequence_end": True} | controls})

    assert [1, 3] == [json.loads(begun[2])["OUTPUT"], events(ended[2])[0]["OUTPUT"]]


async def test_a_decoupled_model_gives_an_event_for_each_answer(http: aiohttp.ClientSession) -> None:
    status, _, three = await ask(http, "repeating/generate_stream", {"INPUT": [4, 5, 6]})
    _, _, failing = await ask(http, "repeating/generate_stream", {"INPUT": [4, 5, 6], "fail_at": 1})
    _, _, none = await ask(http, "repeating/generate_stream", {"INPUT": []})

    assert (200, [4, 5, 6]) == (status, [event["OUTPUT"] for event in events(three)])
    assert [4, "answer 1 failed", 6] == [event.get("OUTPUT", event.get("error")) for event in events(failing)]
    assert [] == events(none)


@pytest.mark.parametrize("values", [[], [1, 2]])
async def test_generate_wants_one_answer(http: aiohttp.ClientSession, values: list[int]) -> None:
    _, _, one = await ask(http, "repeating/generate", {"INPUT": [7]})
    _, _, refused = await ask(http, "repeating/generate", {"INPUT": values})

    assert 7 == json.loads(one)["OUTPUT"]
    assert "generate expects model to produce exactly 1 response" in json.loads(refused)["error"]
