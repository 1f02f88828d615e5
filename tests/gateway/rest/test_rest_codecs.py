"""The HTTP codecs, pure: what goes in comes out, in JSON and in binary, and nothing but RequestError stops it."""

from __future__ import annotations

import contextlib
import copy
import gc
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gateway.bounds import inflate
from gateway.bounds.pieces import PIECE
from gateway.requests.admission import admit
from gateway.requests.classification import classify
from gateway.requests.infer_call import InferCall
from gateway.requests.status import GRPC_STATUS, HTTP_STATUS, grpc_details, http_error
from gateway.requests.waiting import Answer
from gateway.rest.compression import choose, pack, unpacked
from gateway.rest.json_tensors import json_of_tensor, tensor_of_json
from gateway.rest.json_values import LARGE_BYTES, MEMBERS_MAX, JsonError, parse
from gateway.rest.request import OutputForm, OutputForms, decode
from gateway.rest.response import encode_answer, encode_generated
from shared.contract.errors import Code, Reason, RequestError, SequenceError
from shared.contract.messages import ModelRecord, ReplyMessage, decode_infer, encode
from shared.contract.tensors import DATATYPE_OF, NUMPY_TYPE, RANK_MAX, Tensor, from_numpy, to_numpy
from tests.gateway.fake_executor import echo, running_sum

CLASSIFIED = [dtype for dtype, name in DATATYPE_OF.items() if name not in ("BOOL", "FP16")]
JSON_TYPES = [name for name in NUMPY_TYPE if name != "FP16"]
MANY = 1 << 19
"""Elements of an array."""
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
numbers = st.sampled_from(JSON_TYPES).flatmap(
    lambda name: hnp.arrays(
        NUMPY_TYPE[name],
        shapes,
        elements=hnp.from_dtype(NUMPY_TYPE[name], allow_nan=False, allow_infinity=False, allow_subnormal=False),
    )
)
texts = hnp.arrays(np.object_, shapes, elements=st.text(max_size=6))
arrays = st.one_of(numbers, texts)


def wire(array: Any) -> Tensor:
    return from_numpy("T", array)


@given(arrays)
def test_tensors_survive_json_nested_or_flat(array: Any):
    tensor = wire(array)
    flat = json_of_tensor(tensor)
    document = orjson.loads(orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY))

    assert tensor_of_json("T", tensor.datatype, tensor.shape, document) == tensor
    if array.size:
        nested = array.tolist()
        assert tensor_of_json("T", tensor.datatype, tensor.shape, nested) == tensor


@pytest.mark.parametrize(
    ("datatype", "make", "references"),
    [
        ("INT8", lambda: [1] * MANY, 0),
        ("FP64", lambda: [0.5] * MANY, 0),
        ("BYTES", lambda: ["a"] * MANY, 0),
        # Of arrays in arrays the elements are put into one row, which grows by an eighth.
        ("INT8", lambda: [[1, 1] for _ in range(MANY // 2)], 9),
    ],
)
def test_elements_are_not_copied_as_objects(datatype: str, make: Callable[[], list[Any]], references: int) -> None:
    """A body of 64 MiB may have 32 million of them."""
    data = make()
    tracemalloc.start()
    try:
        tensor = tensor_of_json("T", datatype, (MANY,), data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < MANY * references + 2 * len(tensor.raw) + (2 << 20)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": [1, -0, 0.1, 1e22, 5e-324, true, null, "\\u00e9\\ud83d\\ude00"], "a": {"b": []}}',
        b"[18446744073709551615, 18446744073709551616, -18446744073709551616]",
        b"[NaN, -Infinity]",
        b"null",
        b'["\\ud800"]',
        b'["\xff"]',
        b"[01]",
        b"[1.]",
        b"[1e400]",
        b"[1" + b"0" * 5_000 + b"]",
        b"[1] x",
        b'["\n"]',
        b"[1,]",
        b"{1: 2}",
        b"[" * 99 + b"]" * 99,
        b"[" * 101 + b"]" * 101,
        b"[" * 1_015 + b"]" * 1_015,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b"[" * 5_000 + b"]" * 5_000,
    ],
)
def test_large_documents_are_read_like_small_ones(text: bytes) -> None:
    def read(document: bytes) -> Any:
        try:
            return parse(document)
        except RequestError as error:
            return type(error), error.code, error.message

    assert read(text) == read(text + b" " * LARGE_BYTES)


def test_no_kind_of_number_takes_much_longer_than_others() -> None:
    """Else one request keeps the whole gateway waiting: no other thread runs while numbers are read."""
    numbers = [b"1.5", b"5e-324", b"1E300", b"2.2250738585072011e-308", b"1" * 30 + b"e-320"]
    texts = [b"[%b]" % b",".join([number] * 30_000) for number in numbers]

    def seconds(read: Callable[[bytes], Any], text: bytes) -> float:
        """The shortest of three times: the collector, or a cold cache, may fall into one of them."""
        taken: list[float] = []
        for _ in range(3):
            began = time.thread_time()
            found = read(text)
            taken.append(time.thread_time() - began)
            assert json.loads(text) == found
        return min(taken)

    for text in texts:
        assert seconds(parse, text + b" " * LARGE_BYTES) < 8 * seconds(json.loads, text), text[:30]


@pytest.mark.parametrize("last", [b"[]", b"NaN"])
def test_the_collector_does_not_look_through_a_document_while_it_is_read(last: bytes) -> None:
    """No other thread runs while a document is read, and the collector would look through all of it several times."""
    looks: list[dict[str, int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(info)
        del phase

    gc.callbacks.append(note)
    try:
        document = parse(b"[%b%b]" % (b"[]," * LARGE_BYTES, last))
    finally:
        gc.callbacks.remove(note)

    assert len(looks) < len(document) / gc.get_threshold()[0] / 10


@pytest.mark.parametrize("member", [b'"%x":1', b'"%x"  :\t[]', b'"\\\\%x":1', b'"\\"%x":"\\\\"'])
def test_objects_with_very_many_members_are_not_read(member: bytes) -> None:
    """Of one object, or of all together."""
    members = [member % number for number in range(MEMBERS_MAX)]
    for most in (b"{%b}" % b",".join(members), b"[{%b},{%b}]" % (b",".join(members[1:]), members[0])):
        assert json.loads(most) == parse(most + b" " * LARGE_BYTES)
        with pytest.raises(RequestError, match="may have 100000 members together"):
            parse(b'[%b, {"a":{}}]' % most + b" " * LARGE_BYTES)


def test_colons_in_texts_are_no_members() -> None:
    texts = ["12:00:00", ':"', '\\": ', '\\\\":', '{"a": "b"}', json.dumps('"": {"a": 1}')] * (MEMBERS_MAX // 5)

    assert texts == parse(json.dumps(texts).encode())


def test_a_number_beyond_all_doubles_is_refused_among_many() -> None:
    text = b"[%b1e400]" % (b"1e40," * 20_000)

    with pytest.raises(JsonError, match=f"Number too big to be stored in double. at {len(text) - 6}"):
        parse(text + b" " * LARGE_BYTES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"inputs": []}\x00\x80binary data, without the length of its JSON', "Invalid encoding in string. at 15"),
        (b'{"a": "caf\xe9"}', "Invalid encoding in string. at 10"),
        (b"[tree]", "Invalid value. at 1"),
        (b"[-]", "Invalid value. at 2"),
        (b'["\\x"]', "Invalid escape character in string. at 2"),
        (b'["\\ud800"]', "The surrogate pair in string is invalid. at 2"),
        (b"[" * 200, "Invalid value. at 199"),
    ],
)
def test_broken_json_is_refused_in_tritons_words(text: bytes, words: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse(text)

    assert f"failed to parse the request JSON buffer: {words}" == caught.value.message


def test_data_of_a_tensor_without_dimensions_is_left_to_the_check_of_its_shape() -> None:
    assert Tensor("T", "FP32", (), b"") == tensor_of_json("T", "FP32", (), [1.0, 2.0])


def test_an_input_has_at_most_as_many_dimensions_as_an_array() -> None:
    def decoded(rank: int) -> InferCall:
        tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1] * rank, "data": [5]}
        return decode(json.dumps({"inputs": [tensor]}).encode(), InferCall("m"), running_sum)[0]

    assert [(1,) * RANK_MAX] == [tensor.shape for tensor in decoded(RANK_MAX).inputs]
    with pytest.raises(RequestError, match=f"it has {RANK_MAX + 1} dimensions"):
        decoded(RANK_MAX + 1)


def test_a_number_beyond_all_doubles_is_refused_as_a_parameter() -> None:
    body = b'{"inputs": [], "parameters": {"x": 1%b}}%b' % (b"0" * 400, b" " * LARGE_BYTES)

    with pytest.raises(JsonError, match="Number too big to be stored in double"):
        decode(body, InferCall("m"), running_sum)


@given(st.lists(arrays, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_requests_survive_their_encoding_binary_and_json_mixed(given_arrays: list[Any], binary: list[bool]):
    tensors = [from_numpy(f"T{index}", array) for index, array in enumerate(given_arrays)]
    inputs: list[dict[str, Any]] = []
    blobs = b""
    for tensor, as_binary in zip(tensors, binary, strict=False):
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if as_binary:
            described["parameters"] = {"binary_data_size": len(tensor.raw)}
            blobs += tensor.raw
        else:
            described["data"] = json_of_tensor(tensor)
        inputs.append(described)
    document: dict[str, Any] = {
        "id": "r",
        "inputs": inputs,
        "parameters": {"sequence_id": 2**64 - 1, "sequence_start": True, "x": 1.5},
    }
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)

    call, _ = decode(head + blobs, InferCall("m"), echo, header_length=len(head))

    assert list(call.inputs) == tensors
    assert (call.request_id, call.correlation_id, call.start, call.parameters) == ("r", 2**64 - 1, True, {"x": 1.5})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "id", "sequence_id"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_call_or_a_request_error(document: Any):
    with contextlib.suppress(RequestError):
        decode(json.dumps(document).encode(), InferCall("m"), echo)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    keys: list[Any] = list(cast("Any", document).keys() if isinstance(document, dict) else range(len(document)))
    found: list[tuple[Any, Any]] = [(document, key) for key in keys]
    for key in keys:
        if isinstance(document[key], (dict, list)):
            found += places(document[key])
    return found


@given(st.data())
def test_a_good_request_with_anything_in_any_place_is_a_step_or_a_request_error(data: st.DataObject):
    """What the parser lets through can be checked, encoded and sent on; what it refuses can be answered."""
    document: Any = {
        "id": "r",
        "inputs": [
            {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [[1]], "parameters": {"x": 1}},
            {"name": "B", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
        ],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True, "classification": 1}}],
        "parameters": {"sequence_id": 1, "sequence_start": True, "sequence_end": False, "priority": 1, "timeout": 2},
    }
    if data.draw(st.booleans()):
        document["inputs"].pop()
    for _ in range(data.draw(st.integers(0, 3))):
        container, key = data.draw(st.sampled_from(places(document)))
        match data.draw(st.sampled_from(["change", "remove", "move"])):
            case "change":
                container[key] = data.draw(ANYTHING)
            case "remove" if isinstance(container, dict):
                container.pop(key)
            case _:
                other, name = data.draw(st.sampled_from(places(document)))
                container[key] = copy.deepcopy(other[name])
    head = json.dumps(document).encode()
    record = ModelRecord(running_sum(), "{}", ("1",))

    refused: RequestError | None = None
    try:
        call, _ = decode(head + b"\1\0\0\0a", InferCall("running_sum"), running_sum, header_length=len(head))
        message = admit(call, record, "1", arrived_ns=1, make_session=lambda: "s").message
        assert decode_infer(encode(message)) == message
    except RequestError as error:
        refused = error

    if refused is not None:
        status, told = http_error(refused)
        assert status in (400, 404, 501) or isinstance(refused, JsonError)
        assert orjson.dumps(told)


@given(st.binary(max_size=60), st.none() | st.integers(0, 70))
def test_any_bytes_are_a_call_or_a_request_error(body: bytes, length: int | None):
    with contextlib.suppress(RequestError):
        decode(body, InferCall("m"), echo, header_length=length)


def answer(*outputs: Tensor, **rest: Any) -> Answer:
    record = ModelRecord(echo(), "{}", ("1",))
    return Answer(ReplyMessage("1", outputs), record, "1", "", None, **rest)


def test_outputs_take_the_form_that_was_asked_for():
    first, second = wire(np.array([[1, 2]], dtype=np.int32)), from_numpy("U", np.array([[3.5]], dtype=np.float32))
    forms = OutputForms({"T": OutputForm(binary=True)}, OutputForm())

    body, length = encode_answer(answer(first, second, parameters={"p": 1}), forms)

    document = json.loads(body[:length])
    assert document["parameters"] == {"p": 1}
    assert document["outputs"] == [
        {"name": "T", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "U", "datatype": "FP32", "shape": [1, 1], "data": [3.5]},
    ]
    assert body[length:] == first.raw


def test_empty_binary_output_needs_no_header_length():
    body, length = encode_answer(
        answer(wire(np.empty((0, 2), dtype=np.int8))), OutputForms(other=OutputForm(binary=True))
    )

    assert length is None
    assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_values_without_a_json_number_are_written_as_clients_read_them():
    body, _ = encode_answer(answer(wire(np.array([np.nan, np.inf, -np.inf, 0.5], dtype=np.float32))), OutputForms())

    data = json.loads(body)["outputs"][0]["data"]
    assert np.isnan(data[0])
    assert data[1:] == [np.inf, -np.inf, 0.5]


def test_numbers_that_json_lacks_change_nothing_else_of_an_answer():
    """The other numbers are written by orjson: json.dumps takes ten times as long, in one piece."""
    message = answer(wire(np.array([1e-7, np.nan, np.inf])), from_numpy("U", np.array(["null %b"], dtype=np.object_)))

    body, _ = encode_answer(message, OutputForms())
    generated = encode_generated(answer(wire(np.array([-np.inf])), from_numpy("U", np.array([1e-7, np.nan]))))

    assert b'"data":[1e-7,NaN,Infinity]}' in body
    assert b'"data":["null %b"]' in body
    assert generated.startswith(b'{"T":-Infinity,"U":[1e-7,NaN],')


@pytest.mark.parametrize("array", [np.where(np.arange(3 * PIECE + 1) % 9, 0.5, np.nan), np.array(["é"] * (PIECE + 1))])
def test_large_outputs_are_written_in_pieces(array: Any) -> None:
    body, _ = encode_answer(answer(wire(array)), OutputForms())

    (output,) = json.loads(body)["outputs"]
    assert np.array_equal(array, np.array(output["data"]), equal_nan=array.dtype.kind == "f")


def test_text_output_that_is_no_text_is_refused_in_json():
    with pytest.raises(RequestError, match="no UTF-8 text"):
        encode_answer(answer(wire(np.array([b"\xff"], dtype=np.object_))), OutputForms())


# -- classification -------------------------------------------------------------------------------------------------


@given(
    hnp.arrays(st.sampled_from(CLASSIFIED), hnp.array_shapes(min_dims=2, max_dims=2, max_side=5)),
    st.integers(1, 7),
)
@example(np.array([[np.iinfo(np.int64).min, 0]]), 2)
def test_classes_are_the_largest_values_first(array: Any, count: int):
    result = classify(wire(array), count, batched=True)

    rows = [[element.decode().split(":") for element in row] for row in to_numpy(result)]
    assert result.shape == (array.shape[0], min(count, array.shape[1]))
    for row, values in zip(rows, array, strict=True):
        indexes = [int(index) for _, index in row]
        picked = [values[index] for index in indexes if not (values.dtype.kind == "f" and np.isnan(values[index]))]
        assert picked == sorted(picked, reverse=True)
        assert len(set(indexes)) == len(indexes)
        assert all(a < b for a, b in pairwise(indexes) if values[a] == values[b])


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "BF16", "BYTES"])
def test_what_has_no_order_to_triton_is_not_classified(datatype: str):
    with pytest.raises(
        RequestError, match=f"class result not available for output due to unsupported type '{datatype}'"
    ):
        classify(Tensor("T", datatype, (1,), b"\0\0"), 1, batched=False)


@pytest.mark.parametrize("shape", [(0, 4), (0,), (2, 0)])
def test_an_output_without_elements_has_no_classes(shape: tuple[int, ...]):
    result = classify(wire(np.zeros(shape, dtype=np.float32)), 2, batched=True)

    assert (shape[0], min(2, int(np.prod(shape[1:])))) == result.shape


def test_classification_has_a_bound():
    with pytest.raises(RequestError, match="classification output tensor too large"):
        classify(wire(np.zeros(1_000_001, dtype=np.int8)), 1, batched=False)


# -- compression ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]), st.integers(1, 50), st.integers(1, 50))
def test_compressed_bodies_come_back_piece_by_piece(content: bytes, encoding: str, piece: int, step: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inflate, "PIECE_BYTES", piece)
        patch.setattr(inflate, "STEP_BYTES", step)
        *pieces, last = unpacked(pack(content, encoding), encoding, size_max=200)

    assert b"".join([*pieces, last]) == content
    assert all(len(each) == piece for each in pieces)
    assert len(last) < piece


def test_deflate_without_zlib_header_is_understood():
    writer = zlib.compressobj(wbits=-15)

    assert b"".join(unpacked(writer.compress(b"abc") + writer.flush(), "deflate", size_max=10)) == b"abc"


def test_nothing_is_unpacked_beyond_the_bound():
    assert b"".join(unpacked(gzip.compress(bytes(100)), "gzip", size_max=100)) == bytes(100)
    with pytest.raises(RequestError, match="exceeds the maximum allowed input size of 99 bytes"):
        list(unpacked(gzip.compress(bytes(100)), "gzip", size_max=99))


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip;q=0.5", "deflate"),
        ("gzip;q=0.2, identity", ""),
        ("br", ""),
        ("gzip;q=0", ""),
        ("gzip;q=x", ""),
        ("*", ""),
        ("gzip;q=0.5, deflate;q=0.7, br;q=1.0", "deflate"),
    ],
)
def test_response_encoding_is_the_best_weighted_that_is_known(header: str, chosen: str):
    assert choose(header) == chosen


# -- status ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        (Code.UNKNOWN, 400, "UNKNOWN"),
        (Code.INTERNAL, 500, "INTERNAL"),
        (Code.NOT_FOUND, 404, "NOT_FOUND"),
        (Code.INVALID_ARG, 400, "INVALID_ARGUMENT"),
        (Code.UNAVAILABLE, 503, "UNAVAILABLE"),
        (Code.UNSUPPORTED, 501, "UNIMPLEMENTED"),
        (Code.ALREADY_EXISTS, 400, "ALREADY_EXISTS"),
        (Code.CANCELLED, 400, "CANCELLED"),
        (Code.RESOURCE_EXHAUSTED, 429, "RESOURCE_EXHAUSTED"),
        (Code.FORBIDDEN, 403, "PERMISSION_DENIED"),
    ],
)
def test_status_of_each_code(code: Code, http: int, grpc: str):
    assert (HTTP_STATUS[code], GRPC_STATUS[code]) == (http, grpc)
    assert set(HTTP_STATUS) == set(GRPC_STATUS) == set(Code)


def test_sequence_error_says_why_and_how_far_it_came():
    error = SequenceError("gone", Reason.EXPIRED, 4)

    assert http_error(error) == (
        400,
        {"error": "gone", "reason": "expired", "last_step": 4, "retry": "start"},
    )
    assert grpc_details(error) == (
        ("seqmesh-reason", "expired"),
        ("seqmesh-last-step", "4"),
        ("seqmesh-retry", "start"),
    )
