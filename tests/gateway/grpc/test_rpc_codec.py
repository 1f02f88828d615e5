"""Requests and answers survive the codec unchanged; what the protocol forbids is refused in Triton's words."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient import grpc as triton_grpc
from tritonclient.grpc import _utils as triton_utils

from gateway.grpc.codec import (
    decode_request,
    encode_answer,
    encode_stream_answer,
    encode_stream_error,
    requested_forms,
    shape_of,
)
from gateway.grpc.metadata import CallMetadata
from gateway.grpc.pb import pb
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from shared.contract.errors import Code, ModelError, Reason, RequestError, SequenceError
from shared.contract.messages import ModelRecord, ReplyMessage
from shared.contract.model_config import ModelConfig
from shared.contract.parameters import write_parameters
from shared.contract.tensors import RANK_MAX, Tensor, bytes_elements

RECORD = ModelRecord(ModelConfig("m", "python", "", 0, (), ()), "{}", ("1", "3"))
# The client has no types.
triton: Any = triton_grpc
client_side: Any = triton_utils
CONTROL_KEYS = {"sequence_id", "sequence_start", "sequence_end", "sequence_step", "priority", "timeout"}
DATATYPES = st.sampled_from(["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP32", "FP64", "BYTES"])
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
TENSORS = st.builds(
    Tensor, NAMES, DATATYPES, st.lists(st.integers(-1, 1 << 40), max_size=4).map(tuple), st.binary(max_size=64)
)
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
PARAMETERS = st.dictionaries(
    NAMES.filter(lambda name: not name.startswith("triton_") and name not in CONTROL_KEYS),
    st.one_of(st.booleans(), INTEGERS, st.floats(allow_nan=False), NAMES),
    max_size=6,
)


def request(**fields: Any) -> Any:
    return pb.ModelInferRequest(model_name="m", **fields)


def with_parameter(key: str, **choice: Any) -> Any:
    made = request()
    made.parameters[key].CopyFrom(pb.InferParameter(**choice))
    return made


def refusal_of(made: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode_request(made)
    return caught.value


# -- requests -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    tensors=st.lists(TENSORS, max_size=4, unique_by=lambda tensor: tensor.name),
    parameters=PARAMETERS,
    outputs=st.lists(NAMES, max_size=3, unique=True),
)
def test_a_raw_request_round_trips(tensors: list[Tensor], parameters: dict[str, Any], outputs: list[str]) -> None:
    made = request(model_version="3", id="r1")
    for tensor in tensors:
        made.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        made.raw_input_contents.append(tensor.raw)
    for name in outputs:
        made.outputs.add(name=name)
    write_parameters(made.parameters, parameters)
    expected = InferCall("m", "3", "r1", inputs=tuple(tensors), outputs=tuple(outputs), parameters=parameters)

    call = decode_request(pb.ModelInferRequest.FromString(made.SerializeToString()))

    assert expected == call
    assert [type(v) for v in parameters.values()] == [type(call.parameters[k]) for k in parameters]


@settings(deadline=None, max_examples=50)
@given(
    sequence=st.one_of(st.integers(1, (1 << 63) - 1), st.text(st.characters(codec="ascii"), min_size=1, max_size=128)),
    start=st.booleans(),
    end=st.booleans(),
    priority=st.integers(0, (1 << 64) - 1),
    timeout=st.integers(0, (1 << 63) - 1),
)
def test_the_ordinary_clients_sequence_parameters_are_understood(
    sequence: int | str, start: bool, end: bool, priority: int, timeout: int
) -> None:
    tensor = triton.InferInput("INPUT", [1], "INT32")
    tensor.set_data_from_numpy(np.array([5], dtype=np.int32))
    made = client_side._get_inference_request(
        "m", [tensor], "", "r1", None, sequence, start, end, priority, timeout, {"gain": 0.5, "on": True}
    )
    expected = InferCall(
        "m",
        request_id="r1",
        correlation_id=sequence,
        start=start,
        end=end,
        priority=priority,
        timeout_us=timeout,
        inputs=(Tensor("INPUT", "INT32", (1,), b"\x05\0\0\0"),),
        parameters={"gain": 0.5, "on": True},
    )

    assert expected == decode_request(made)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"int64_param": -1}, (1 << 64) - 1),
        ({"int64_param": -(1 << 63)}, 1 << 63),
        ({"int64_param": 0}, 0),
        ({"string_param": ""}, ""),
        ({"string_param": "42"}, "42"),
    ],
)
def test_a_sequence_id_is_a_uint64_or_a_string(choice: dict[str, Any], expected: int | str) -> None:
    """A negative int64 is how a client without unsigned integers writes a large id."""
    call = decode_request(with_parameter("sequence_id", **choice))

    assert expected == call.correlation_id
    assert type(expected) is type(call.correlation_id)


def test_a_step_number_and_the_streams_own_parameter_are_no_custom_parameters() -> None:
    made = with_parameter("sequence_step", int64_param=7)
    made.parameters["triton_enable_empty_final_response"].bool_param = True

    call = decode_request(made)

    assert call.expected_step == 7
    assert call.parameters == {}


def test_session_and_trace_come_from_the_calls_metadata() -> None:
    metadata = CallMetadata({"traceparent": "00-1-2-01"}, session_id="s")

    call = decode_request(request(), metadata)

    assert (call.session_id, call.trace_headers) == ("s", {"traceparent": "00-1-2-01"})


@pytest.mark.parametrize(
    ("key", "choice", "message"),
    [
        (
            "sequence_id",
            {"bool_param": True},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_id",
            {"uint64_param": 5},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_start",
            {"int64_param": 1},
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        ("sequence_end", {}, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        (
            "priority",
            {"string_param": "1"},
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        ("timeout", {"uint64_param": 1}, "invalid value type for 'timeout' parameter, expected int64_param."),
        ("timeout", {"int64_param": -1}, "invalid value for 'timeout', expected value >= 0."),
        ("sequence_step", {"int64_param": 0}, "invalid value for 'sequence_step', expected value >= 1."),
        (
            "triton_x",
            {"bool_param": True},
            (
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response"
            ),
        ),
        (
            "triton_enable_empty_final_response",
            {"string_param": "yes"},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
        (
            "mine",
            {},
            "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
        ),
    ],
)
def test_a_parameter_of_the_wrong_type_or_value_is_refused(key: str, choice: dict[str, Any], message: str) -> None:
    refusal = refusal_of(with_parameter(key, **choice))

    assert message == refusal.message
    assert refusal.code is Code.INVALID_ARG


def test_a_string_id_of_128_characters_is_the_longest() -> None:
    assert decode_request(with_parameter("sequence_id", string_param="x" * 128)).correlation_id == "x" * 128

    refusal = refusal_of(with_parameter("sequence_id", string_param="x" * 129))

    assert refusal.message == "string correlation ID cannot be longer than 128 characters"
    assert refusal.code is Code.UNSUPPORTED


# -- tensors of a request -------------------------------------------------------------------------------------------


def test_typed_contents_become_bytes() -> None:
    made = request()
    made.inputs.add(name="A", datatype="INT16", shape=[2], contents=pb.InferTensorContents(int_contents=[1, -2]))
    made.inputs.add(name="B", datatype="BYTES", shape=[1], contents=pb.InferTensorContents(bytes_contents=[b"ab"]))
    expected = (Tensor("A", "INT16", (2,), b"\1\0\xfe\xff"), Tensor("B", "BYTES", (1,), b"\2\0\0\0ab"))

    assert expected == decode_request(made).inputs


def test_raw_and_typed_contents_must_not_be_mixed() -> None:
    made = request(raw_input_contents=[b"\1\0"])
    made.inputs.add(name="A", datatype="INT16", shape=[1])
    made.inputs.add(name="B", datatype="INT16", shape=[1], contents=pb.InferTensorContents(int_contents=[1]))
    expected = "contents field must not be specified when using raw_input_contents for 'B' for model 'm'"

    assert expected == refusal_of(made).message


def test_an_input_has_at_most_as_many_dimensions_as_an_array() -> None:
    def of(rank: int) -> Any:
        return pb.ModelInferRequest.InferInputTensor(name="INPUT", datatype="FP32", shape=[1] * rank)

    assert (1,) * RANK_MAX == shape_of(of(RANK_MAX), "m")
    with pytest.raises(RequestError, match=f"'INPUT' for model 'm' has {RANK_MAX + 1} dimensions"):
        shape_of(of(RANK_MAX + 1), "m")


def test_an_input_without_data_is_refused() -> None:
    made = request(raw_input_contents=[b"\1\0"])
    made.inputs.add(name="A", datatype="INT16", shape=[1])
    made.inputs.add(name="B", datatype="INT16", shape=[1])

    assert refusal_of(made).message == "unable to find data for input tensor 'B' for model 'm' in request."


def test_raw_contents_that_belong_to_no_input_are_refused() -> None:
    made = request(raw_input_contents=[b"\1\0", b"\2\0"])
    made.inputs.add(name="A", datatype="INT16", shape=[1])

    assert refusal_of(made).message == "unexpected additional input data for model 'm'"


def test_a_datatype_that_does_not_exist_is_carried_by_no_field() -> None:
    made = request()
    made.inputs.add(name="A", datatype="INT4", shape=[1], contents=pb.InferTensorContents(int_contents=[1]))

    assert refusal_of(made).message == (
        "unexpected explicit tensor data for input tensor 'A' for model 'm' of type 'INT32', expected datatype 'INT4'"
    )


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_tensors_in_shared_memory_are_refused_where_it_is_off(where: str) -> None:
    made = request()
    tensor = getattr(made, where).add(name="A")
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_byte_size"].int64_param = 4

    with pytest.raises(RequestError, match="Client shared memory is disabled") as caught:
        (decode_request if where == "inputs" else requested_forms)(made)

    assert caught.value.code is Code.UNSUPPORTED


def test_a_region_of_shared_memory_has_a_name() -> None:
    made = request()
    made.inputs.add(name="A").parameters["shared_memory_region"].int64_param = 3

    assert refusal_of(made).message == (
        "invalid value type for 'shared_memory_region' parameter for tensor 'A', expected string_param."
    )


def test_forwarded_metadata_becomes_parameters() -> None:
    made = with_parameter("mine", string_param="x")

    call = decode_request(made, CallMetadata({}, forwarded={"user": "somebody"}))

    assert call.parameters == {"mine": "x", "user": "somebody"}


def test_an_output_may_be_asked_for_as_classes() -> None:
    made = request()
    made.outputs.add(name="PLAIN")
    made.outputs.add(name="CLASSES").parameters["classification"].int64_param = 3

    assert {"CLASSES": 3} == requested_forms(made)
    assert ("PLAIN", "CLASSES") == decode_request(made).outputs


def test_each_form_takes_as_long_as_any_other() -> None:
    """A message may list thousands of outputs."""

    def taken_s(count: int) -> float:
        made = request()
        for number in range(count):
            made.outputs.add(name=f"{number}").parameters["classification"].int64_param = 1
        began_s = time.thread_time()
        assert count == len(requested_forms(made))
        return time.thread_time() - began_s

    # Where each took as long as all before it, this would be 256 times as long.
    assert min(taken_s(8192) for _ in range(3)) < 64 * min(taken_s(512) for _ in range(5))


def test_each_input_takes_as_long_as_any_other() -> None:
    """A message may have thousands of inputs."""

    def taken_s(count: int) -> float:
        made = request()
        for number in range(count):
            made.inputs.add(name=f"{number}", datatype="INT8", shape=[0])
            made.raw_input_contents.append(b"")
        began_s = time.thread_time()
        assert count == len(decode_request(made).inputs)
        return time.thread_time() - began_s

    # Where each took as long as all before it, this would be 256 times as long.
    assert min(taken_s(8192) for _ in range(3)) < 64 * min(taken_s(512) for _ in range(5))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"int64_param": 0}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"int64_param": -1}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"uint64_param": 3}, "invalid value type for 'classification' parameter, expected int64_param"),
        ({"string_param": "3"}, "invalid value type for 'classification' parameter, expected int64_param"),
    ],
)
def test_a_number_of_classes_is_a_positive_int64(choice: dict[str, Any], message: str) -> None:
    made = request()
    made.outputs.add(name="A").parameters["classification"].CopyFrom(pb.InferParameter(**choice))

    with pytest.raises(RequestError) as caught:
        requested_forms(made)

    assert message == caught.value.message


# -- answers --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(outputs=st.lists(TENSORS, max_size=4).map(tuple), parameters=PARAMETERS, request_id=NAMES, version=st.just("3"))
def test_an_answer_round_trips(
    outputs: tuple[Tensor, ...], parameters: dict[str, Any], request_id: str, version: str
) -> None:
    answer = Answer(ReplyMessage(version, outputs), RECORD, version, request_id, None, parameters)

    response = pb.ModelInferResponse.FromString(encode_answer(answer).SerializeToString())

    assert (response.model_name, response.model_version, response.id) == ("m", version, request_id)
    assert outputs == tuple(
        Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), raw)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    )
    assert parameters == {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in response.parameters.items()
    }


def test_classes_replace_the_output_they_were_asked_for() -> None:
    scores = Tensor("SCORES", "FP32", (3,), np.array([0.5, 2.0, 1.0], np.float32).tobytes())
    other = Tensor("OTHER", "FP32", (1,), b"\0\0\0\0")
    answer = Answer(ReplyMessage("1", (scores, other)), RECORD, "1", "r1", None)

    response = encode_answer(answer, {"SCORES": 2})

    assert [("SCORES", "BYTES", [2]), ("OTHER", "FP32", [1])] == [
        (tensor.name, tensor.datatype, list(tensor.shape)) for tensor in response.outputs
    ]
    assert [b"2.000000:1", b"1.000000:2"] == list(bytes_elements(response.raw_output_contents[0]))


def test_a_streams_answer_is_marked_as_final() -> None:
    answer = Answer(ReplyMessage("1"), RECORD, "1", "r1", None)

    message = encode_stream_answer(answer)

    assert message.error_message == ""
    assert message.infer_response.parameters["triton_final_response"].bool_param
    assert message.infer_response.id == "r1"


def test_a_streams_error_says_which_request_and_why() -> None:
    message = encode_stream_error(SequenceError("gone", Reason.EXPIRED, 7), "r1", "m")
    parameters = message.infer_response.parameters

    assert (message.error_message, message.infer_response.id) == ("gone", "r1")
    assert parameters["code"].string_param == "INVALID_ARG"
    assert parameters["reason"].string_param == "expired"
    assert parameters["last_step"].int64_param == 7
    assert "triton_final_response" not in parameters, "the request was refused: it has no answer that could be final"
    assert message.infer_response.model_name == ""


def test_the_error_of_an_accepted_request_is_its_final_answer() -> None:
    error = ModelError("it broke")
    error.accepted = True

    response = encode_stream_error(error, "r1", "m").infer_response

    assert response.parameters["triton_final_response"].bool_param
    assert response.model_name == "m"


def test_an_error_without_text_is_still_an_error_on_a_stream() -> None:
    """Triton cancels with an empty message; an empty `error_message` would read as success."""
    assert encode_stream_error(RequestError("", Code.CANCELLED), "r1", "m").error_message == "CANCELLED"
