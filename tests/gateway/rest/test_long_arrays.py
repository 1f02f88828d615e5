"""A large document whose long arrays are read in pieces says what it says as a whole, or is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import orjson
import pytest

from gateway.requests.infer_call import InferCall
from gateway.rest.generate_request import decode_generate
from gateway.rest.json_tensors import WRONG_COUNT, flatten
from gateway.rest.json_values import JsonError, parse
from gateway.rest.long_arrays import LongArray
from gateway.rest.request import decode
from shared.contract.errors import RequestError
from shared.contract.limits import JSON_NESTING_MAX
from shared.contract.tensors import Tensor
from tests.gateway.fake_executor import echo

STORIES = 300
SPECIAL = '"\\[]{}:, a\n0é'


def some_text(by: random.Random) -> str:
    return "".join(by.choice(SPECIAL) for _ in range(by.randrange(6)))


def some_value(by: random.Random, depth: int) -> Any:
    kind = by.random()
    if depth and kind < 0.5:
        return [some_value(by, depth - 1) for _ in range(by.randrange(6))]
    if depth and kind < 0.6:
        return some_object(by, depth - 1)
    return by.choice([None, True, 1, -5, 0.5, 1e300, 2**63, some_text(by)])


def some_object(by: random.Random, depth: int) -> dict[str, Any]:
    return {some_text(by): some_value(by, depth) for _ in range(by.randrange(4))}


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Documents of a few bytes are large, and their arrays are long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.rest.json_values.LARGE_BYTES", 0)
        patch.setattr("gateway.rest.long_arrays.LONG_BYTES", 2)
        patch.setattr("gateway.rest.long_arrays.PIECE_BYTES", 7)
        yield


def resolved(value: Any) -> Any:
    """The value with its long arrays read, in both ways alike."""
    if isinstance(value, LongArray):
        whole = value.whole()
        assert len(whole) == value.count
        assert flatten(value.whole()) == flatten(list(chain(*map(flatten, value.elements()))))
        return whole
    if isinstance(value, dict):
        return {key: resolved(inner) for key, inner in cast("dict[str, Any]", value).items()}
    return [resolved(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(4))
def test_a_document_says_what_it_says_as_a_whole(seed: int) -> None:
    """And with another byte, or without one, it is read or refused as is the whole."""
    by = random.Random(seed)
    for _ in range(STORIES):
        text = json.dumps(some_object(by, 4), indent=by.choice([None, 1]), ensure_ascii=by.random() < 0.5).encode()
        at, byte = by.randrange(len(text)), by.choice([b"", *(bytes([code]) for code in b'"\\[]{}:,0 ')])
        for document in (text, text[:at] + byte + text[at + 1 :]):
            try:
                expected = orjson.loads(document)
            except orjson.JSONDecodeError:
                with pytest.raises(RequestError):
                    parse(document)
            else:
                assert expected == resolved(parse(document)), document


def request(data: bytes, datatype: str = "INT64", shape: bytes = b"[1,2]") -> bytes:
    text = b'{"inputs":[{"name":"INPUT0","shape":%b,"data":%b,"datatype":"%b"}]}'
    return text % (shape, data, datatype.encode())


def only_input(text: bytes) -> Tensor:
    (tensor,) = decode(text, InferCall("echo"), echo)[0].inputs
    return tensor


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT64", b"[[9007199254740993], [-9223372036854775808]]"),
        ("UINT64", b"[18446744073709551615, 1]"),
        ("FP32", b"[1, NaN]"),
        ("FP64", b"[-Infinity, 1e300]"),
        ("BOOL", b"[true, 0]"),
        ("BYTES", b'["[1,2]", "\\\\"]'),
    ],
)
def test_a_tensor_is_the_same_in_pieces(datatype: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    text = request(data, datatype)
    in_pieces = only_input(text)
    monkeypatch.setattr("gateway.rest.json_values.LARGE_BYTES", len(text))

    assert only_input(text) == in_pieces


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (request(b"[1, 1.5]"), "attempt to access JSON non-signed-integer as signed-integer"),
        (request(b"[1, 2, true]"), WRONG_COUNT),
        (request(b"[[[1]]]"), WRONG_COUNT),
        (request(b"[1, 300]", "INT8"), "an element of input 'INPUT0' is out of the range of INT8"),
        (request(b"[[1], 2x]"), "Missing a comma or ']' after an array element. at 56"),
        (request(b"[1, 2]") + b"x", "The document root must not be followed by other values. at 77"),
        (request(b"[" * (JSON_NESTING_MAX - 2) + b"1, 2" + b"]" * (JSON_NESTING_MAX - 2)), "nesting depth exceeds"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: bytes, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        only_input(text)

    assert words in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        request(b"[1]", shape=b"[" + b"1," * 101 + b"1]"),
        b'{"inputs":[%b{}]}' % (b"{}," * 101),
        b"[" + b"[]," * 101 + b"[]]",
        b"}" * 101,
    ],
)
def test_very_many_values_besides_the_data_are_not_read(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rest.json_values.VALUES_MAX", 100)

    with pytest.raises(RequestError, match="may have 100 values"):
        only_input(text)


def test_arrays_as_deep_as_is_allowed_are_read() -> None:
    depth = JSON_NESTING_MAX - 3

    assert only_input(request(b"[" * depth + b"1, 2" + b"]" * depth)) == only_input(request(b"[1, 2]"))


@pytest.mark.parametrize(("data", "shape"), [(b"[1, 2, 3]", (1, 3)), (b"[[1], [2]]", (1, 2))])
def test_generate_takes_the_shape_from_the_number_of_elements(data: bytes, shape: tuple[int, ...]) -> None:
    call = decode_generate(b'{"INPUT0": %b}' % data, InferCall("echo"), echo())

    assert [shape] == [tensor.shape for tensor in call.inputs]


def test_an_array_that_is_no_data_is_read_as_a_whole() -> None:
    with pytest.raises(JsonError, match="Unable to parse 'name'"):
        only_input(request(b"[1, 2]", shape=b"[    1, 2]").replace(b'"inputs"', b'"outputs":[1, 2, "x"],"inputs"'))
