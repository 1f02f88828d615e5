"""A document whose end was read before is decoded as if it had been read as a whole, whatever is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest

from gateway.requests.infer_call import InferCall
from gateway.rest import request
from gateway.rest.request import OutputForms, decode_json
from shared.contract.errors import Code, RequestError

SAID = b'{"id":"7","parameters":{"sequence_id":3,"sequence_start":true,"lang":"de"}'
OF_PERF_ANALYZER = (
    b',"inputs":[{"name":"X","shape":[1,1],"datatype":"INT32","parameters":{"binary_data_size":4}}]'
    b',"outputs":[{"name":"Y","parameters":{"binary_data":true}}]}'
)
OF_TRITONCLIENT = (
    b', "inputs": [{"name": "A", "shape": [1, 2], "datatype": "INT8", "parameters": {"binary_data_size": 2}},'
    b' {"name": "B", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}]}'
)
ENDS = (OF_PERF_ANALYZER, OF_TRITONCLIENT)
DATA = b"\1\2\3\4"
NEVER = re.compile(rb"(?!)")
Decoded = tuple[InferCall, OutputForms] | tuple[Code, str]


def decoded(document: bytes, data: bytes = DATA) -> Decoded:
    try:
        return decode_json(document + data, len(document), InferCall("m"))
    except RequestError as error:
        return error.code, error.message


def decoded_whole(document: bytes, data: bytes = DATA) -> Decoded:
    """As `decoded`, by a gateway that knows no ends."""
    with patch.object(request, "BEGIN_OF_TENSORS", NEVER):
        return decoded(document, data)


def broken(text: bytes) -> Iterator[bytes]:
    """The text with one byte less, another byte, or one more, at each place."""
    for place in range(len(text)):
        yield text[:place] + text[place + 1 :]
        for byte in b'"{}[],:0x\\ ':
            yield text[:place] + bytes([byte]) + text[place + 1 :]
            yield text[:place] + bytes([byte]) + text[place:]


@pytest.mark.parametrize("end", ENDS, ids=["perf_analyzer", "tritonclient"])
def test_an_end_that_is_known_is_not_read_again(end: bytes) -> None:
    request._read_tensors.cache_clear()
    first, later = decoded(SAID + end), decoded(SAID.replace(b"7", b"8") + end)

    assert request._read_tensors.cache_info().hits == 1
    assert decoded_whole(SAID + end) == first
    assert isinstance(later[0], InferCall)
    assert (later[0].request_id, later[0].correlation_id, later[0].parameters) == ("8", 3, {"lang": "de"})
    assert b"".join(tensor.raw for tensor in later[0].inputs) == DATA


@pytest.mark.parametrize("end", ENDS, ids=["perf_analyzer", "tritonclient"])
def test_a_document_with_a_mistake_is_judged_as_a_whole(end: bytes) -> None:
    decoded(SAID + end)
    for document in chain((text + end for text in broken(SAID)), (SAID + text for text in broken(end))):
        assert decoded_whole(document) == decoded(document), document


@pytest.mark.parametrize(
    "document",
    [
        b'{"inputs":[],"id":"7"' + OF_PERF_ANALYZER,
        b'{"id":"7","outputs":[{"name":"Z"}]' + OF_TRITONCLIENT,
        b'{"outputs":[{"name":"Z"}]' + OF_PERF_ANALYZER,
        b'{"parameters":{"a":1,"inputs":2}' + OF_PERF_ANALYZER,
        b'{"parameters":{"a":",\\"inputs\\":"}' + OF_PERF_ANALYZER,
        b'{"parameters":{"a":1' + OF_PERF_ANALYZER + b"}",
        b'{"id":"7"' + OF_PERF_ANALYZER[:-1] + b',"id":"8"}',
        b'{"id":"7"' + OF_PERF_ANALYZER[:-1] + b',"inputs":[]}',
        b'{"id":"7"' + OF_PERF_ANALYZER + b"{}",
        b'[{"id":"7"' + OF_PERF_ANALYZER + b"]",
        b"{" + OF_PERF_ANALYZER,
        b"{" + OF_PERF_ANALYZER[1:],
        b'{"id":"7"' + OF_PERF_ANALYZER.replace(b'"INT32"', b'"INT32","data":[1]'),
        b'{"id":"7"' + OF_PERF_ANALYZER.replace(b"binary_data_size", b"shared_memory_region"),
        b'{"id":"7"' + OF_PERF_ANALYZER.replace(b'"binary_data"', b'"shared_memory_region"'),
        b'{"id":"7","parameters":{"binary_data_output":true}' + OF_TRITONCLIENT,
        b'{"id":"7","parameters":{"triton_x":1}' + OF_PERF_ANALYZER,
        b'{"id":7' + OF_PERF_ANALYZER,
        b'{"id":"\xff"' + OF_PERF_ANALYZER,
        b'\xef\xbb\xbf{"id":"7"' + OF_PERF_ANALYZER,
        b'{"id":"7","parameters":{"a":NaN}' + OF_PERF_ANALYZER,
    ],
)
@pytest.mark.parametrize("data", [DATA, DATA[:-1], DATA + b"x", b""])
def test_whatever_stands_in_a_document_it_means_the_same(document: bytes, data: bytes) -> None:
    for end in ENDS:
        decoded(b'{"id":"7"' + end)

    assert repr(decoded_whole(document, data)) == repr(decoded(document, data))


def test_documents_with_their_data_in_json_take_no_place_among_the_known() -> None:
    request._read_tensors.cache_clear()
    document: Any = b'{"id":"7","inputs":[{"name":"X","shape":[1],"datatype":"INT32","data":[1]}]}'
    decode_json(document, len(document), InferCall("m"))

    assert request._read_tensors.cache_info().currsize == 0
