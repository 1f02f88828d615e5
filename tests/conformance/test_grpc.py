"""gRPC itself: what each rpc answers, how parameters and contents must be typed, what a stream promises.

Requests are made as messages, for what tritonclient would not send. Source: triton-spec 5.2, 5.9 and 6.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as blocking
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conformance.calls import Answer, Gate, Refused, Step, Stream, answer_of, fresh_id, neighbours
from tests.conformance.conftest import MakeTarget
from tests.conformance.targets import Target
from tests.conformance.test_http_protocol import BATCH_NOTE
from tests.mesh.running_mesh import PATIENCE_S

pb: Any = service_pb2
blocking_client: Any = blocking
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
FIVE = (5).to_bytes(4, "little")
_aio: Any = grpc.aio
END = _aio.EOF


@pytest.fixture
async def stub(target: Target) -> AsyncIterator[Any]:
    """The protocol's own stub."""
    async with grpc.aio.insecure_channel(target.grpc, options=UNLIMITED) as channel:
        stubs: Any = service_pb2_grpc
        yield stubs.GRPCInferenceServiceStub(channel)


def parameter(value: Any) -> Any:
    """An InferParameter; a pair names the field, None leaves it without a value."""
    if value is None:
        return pb.InferParameter()
    if isinstance(value, tuple):
        return pb.InferParameter(**{value[0]: value[1]})
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return pb.InferParameter(**{fields[type(value)]: value})


def request(
    model: str = "stateless",
    *,
    parameters: Mapping[str, Any] | None = None,
    contents: Mapping[str, Any] | None = None,
    raw: tuple[bytes, ...] | None = None,
    datatype: str = "INT32",
    of_input: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Mapping[str, Any]] | None = None,
    shape: tuple[int, ...] = (1, 1),
    **fields: Any,
) -> Any:
    """A request with the number 5 as INPUT, raw, unless something else is said."""
    made = pb.ModelInferRequest(model_name=model, **fields)
    tensor = made.inputs.add(name="INPUT", datatype=datatype, shape=shape)
    if contents is not None:
        tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    made.raw_input_contents.extend([FIVE] if raw is None and contents is None else raw or ())
    put(tensor.parameters, of_input)
    put(made.parameters, parameters)
    for name, wishes in (outputs or {}).items():
        put(made.outputs.add(name=name).parameters, wishes)
    return made


def put(target: Any, parameters: Mapping[str, Any] | None) -> None:
    """Writes parameters into a message's map."""
    for name, value in (parameters or {}).items():
        target[name].CopyFrom(parameter(value))


async def status_of(call: Any) -> tuple[str, str]:
    """Code and text of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


async def streamed(stub: Any, *requests: Any, metadata: Any = ()) -> list[Any]:
    """All responses of a stream that brings these requests and half-closes; it must end with OK."""
    call = stub.ModelStreamInfer(metadata=metadata)
    for one in requests:
        await call.write(one)
    await call.done_writing()
    responses: list[Any] = []
    async with asyncio.timeout(PATIENCE_S):
        while (response := await call.read()) is not END:
            responses.append(response)
        assert await call.code() is grpc.StatusCode.OK
    return responses


# -- refusals, which read the same in a stream ------------------------------------------------------------------------

SEQUENCE = {"sequence_id": 77, "sequence_start": True, "sequence_end": True}
TYPED = "unexpected explicit tensor data for input tensor 'INPUT' for model 'stateless'"
RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
    "'triton_' are allowed: triton_enable_empty_final_response"
)
ID_TYPE = "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."
CUSTOM_TYPE = "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param."
CLASS_TYPE = "invalid value type for 'classification' parameter, expected int64_param"
SHAPE = "[request id: <id_unknown>] unexpected shape for input 'INPUT' for model "
SIZE = "[request id: <id_unknown>] input byte size mismatch for input 'INPUT' for model 'stateless'. Expected 4, got "


def refusal(name: str, made: Any, text: str, code: str = "INVALID_ARGUMENT") -> Any:
    """A row of the table below."""
    return pytest.param(made, code, text, id=name)


def with_input_twice(made: Any, contents: Mapping[str, Any] | None = None) -> Any:
    """The request with a second input of the same name, without further raw data."""
    made.inputs.add().CopyFrom(made.inputs[0])
    if contents is not None:
        made.inputs[1].contents.CopyFrom(pb.InferTensorContents(**contents))
    return made


REFUSALS = [
    refusal("id_bool", request("direct", parameters={**SEQUENCE, "sequence_id": True}), ID_TYPE),
    refusal("id_double", request("direct", parameters={**SEQUENCE, "sequence_id": 1.5}), ID_TYPE),
    refusal("id_none", request("direct", parameters={**SEQUENCE, "sequence_id": None}), ID_TYPE),
    refusal("id_uint64", request("direct", parameters={**SEQUENCE, "sequence_id": ("uint64_param", 5)}), ID_TYPE),
    refusal(
        "id_long",
        request("direct", parameters={**SEQUENCE, "sequence_id": "x" * 129}),
        "string correlation ID cannot be longer than 128 characters",
        "UNIMPLEMENTED",
    ),
    refusal(
        "start_int",
        request("direct", parameters={**SEQUENCE, "sequence_start": 1}),
        "invalid value type for 'sequence_start' parameter, expected bool_param.",
    ),
    refusal(
        "end_text",
        request("direct", parameters={**SEQUENCE, "sequence_end": "yes"}),
        "invalid value type for 'sequence_end' parameter, expected bool_param.",
    ),
    *(
        refusal(
            f"priority_{type(value).__name__}",
            request(parameters={"priority": value}),
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        )
        for value in (True, "1", 1.5)
    ),
    refusal(
        "priority_negative",
        request(parameters={"priority": -1}),
        "invalid value for 'priority', expected value >= 0.",
    ),
    *(
        refusal(
            f"timeout_{value[0]}",
            request(parameters={"timeout": value}),
            "invalid value type for 'timeout' parameter, expected int64_param.",
        )
        for value in (("uint64_param", 3), ("string_param", "3"))
    ),
    refusal("triton_key", request(parameters={"triton_x": True}), RESERVED),
    refusal(
        "empty_final_text",
        request(parameters={"triton_enable_empty_final_response": "x"}),
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
    ),
    refusal("custom_none", request(parameters={"mine": None}), CUSTOM_TYPE),
    refusal(
        "raw_and_typed",
        request(contents={"int_contents": [5]}, raw=(FIVE,)),
        "contents field must not be specified when using raw_input_contents for 'INPUT' for model 'stateless'",
    ),
    refusal(
        "no_data", request(raw=()), "unable to find data for input tensor 'INPUT' for model 'stateless' in request."
    ),
    refusal(
        "other_field", request(contents={"fp32_contents": [5]}), f"{TYPED} of type 'FP32', expected datatype 'INT32'"
    ),
    refusal(
        "two_fields",
        request(contents={"int_contents": [5], "fp32_contents": [5]}),
        f"{TYPED}, binary data was already supplied.",
    ),
    refusal(
        "half_typed",
        request(contents={"fp32_contents": [5]}, datatype="FP16"),
        f"{TYPED} of type 'FP32', expected datatype 'FP16'",
    ),
    refusal(
        "brain_typed",
        request(contents={"fp32_contents": [5]}, datatype="BF16"),
        f"{TYPED} of type 'FP32', expected datatype 'BF16'",
    ),
    refusal("too_many", request(contents={"int_contents": [5, 6]}), f"{SIZE}8"),
    refusal("empty_contents", request(contents={}), f"{SIZE}0"),
    refusal("too_short", request(raw=(b"\0",)), f"{SIZE}1"),
    refusal(
        "other_datatype",
        request(datatype="FP32"),
        "[request id: <id_unknown>] inference input 'INPUT' data-type is 'FP32', but model 'stateless' expects 'INT32'",
    ),
    refusal(
        "unknown_output", request(outputs={"NOPE": {}}), "unexpected inference output 'NOPE' for model 'stateless'"
    ),
    refusal(
        "region_type",
        request(raw=(), of_input={"shared_memory_region": 3}),
        "invalid value type for 'shared_memory_region' parameter for tensor 'INPUT', expected string_param.",
    ),
    refusal(
        "region_size",
        request(raw=(), of_input={"shared_memory_region": "mine"}),
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'INPUT'",
    ),
    refusal(
        "size_without_region",
        request(raw=(), of_input={"shared_memory_byte_size": 4}),
        "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT'",
    ),
    refusal(
        "region_of_input",
        request(raw=(), of_input={"shared_memory_region": "mine", "shared_memory_byte_size": 4}),
        "Unable to find shared memory region: 'mine'",
        "NOT_FOUND",
    ),
    refusal(
        "region_of_output",
        request(outputs={"OUTPUT": {"shared_memory_region": "mine", "shared_memory_byte_size": 4}}),
        "Unable to find shared memory region: 'mine'",
        "NOT_FOUND",
    ),
    refusal("classes_text", request(outputs={"OUTPUT": {"classification": "1"}}), CLASS_TYPE),
    refusal("classes_uint64", request(outputs={"OUTPUT": {"classification": ("uint64_param", 1)}}), CLASS_TYPE),
    refusal(
        "classes_0",
        request(outputs={"OUTPUT": {"classification": 0}}),
        "invalid value for 'classification' parameter, expected >= 0",
    ),
    refusal("unknown_model", request("nope"), "Request for unknown model: 'nope' is not found", "NOT_FOUND"),
    refusal(
        "unknown_version",
        request(model_version="2"),
        "Request for unknown model: 'stateless' version 2 is not found",
        "NOT_FOUND",
    ),
    refusal(
        "version_text",
        request(model_version="x"),
        "failed to get model version from specified version string 'x' (details: stol), version should be an integral "
        "value > 0",
    ),
    refusal(
        "no_id",
        request("direct"),
        "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
    ),
    refusal(
        "input_twice",
        with_input_twice(request(id="r7")),
        "[request id: r7] input 'INPUT' already exists in request",
    ),
    refusal(
        "input_twice_with_raw_and_typed_data",
        with_input_twice(request(), contents={"int_contents": [5]}),
        "[request id: <id_unknown>] input 'INPUT' already exists in request",
    ),
    refusal(
        "open_dimension",
        request(shape=(1, -1)),
        "[request id: <id_unknown>] All input dimensions should be specified for input 'INPUT' for model 'stateless', "
        "got [1,-1]",
    ),
    refusal(
        "open_dimension_of_another_rank",
        request(shape=(1, 1, -1)),
        f"{SHAPE}'stateless'. Expected [-1,-1], got [1,1,-1]. {BATCH_NOTE}",
    ),
    refusal(
        "negative_dimension",
        request("pairs", shape=(1, -5)),
        f"{SHAPE}'pairs'. Expected [-1,1], got [1,-5]. {BATCH_NOTE}",
    ),
    refusal("request_id_prefix", request(id="r7", raw=(b"\0",)), SIZE.replace("<id_unknown>", "r7") + "1"),
]


@pytest.mark.parametrize(("made", "code", "text"), REFUSALS)
async def test_a_request_is_refused_by_a_call_and_in_a_stream_which_goes_on(
    stub: Any, made: Any, code: str, text: str
) -> None:
    assert (code, text) == await status_of(stub.ModelInfer(made))

    refused_one, answered = await streamed(stub, made, request(id="after"))

    assert (text, made.id) == (refused_one.error_message, refused_one.infer_response.id)
    assert "triton_final_response" not in refused_one.infer_response.parameters
    assert answered.infer_response.id == "after"
    assert answered.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (request(parameters={"timeout": -3}), "invalid value for 'timeout', expected value >= 0."),
        (request(raw=(FIVE, FIVE)), "unexpected additional input data for model 'stateless'"),
        (
            request("corrid_int32", datatype="INT8", contents={"int_contents": [300]}),
            "value out of range for input tensor 'INPUT' for model 'corrid_int32', datatype 'INT8' holds -128 to 127",
        ),
    ],
)
@pytest.mark.mesh_only(
    "2.51 reads a negative timeout as a huge one, cuts values off and ignores surplus data; it has shm"
)
async def test_what_the_mesh_refuses_and_triton_does_not(stub: Any, made: Any, text: str) -> None:
    _, said = await status_of(stub.ModelInfer(made))

    assert said.startswith(text)


# -- parameters and tensors that are taken ----------------------------------------------------------------------------


async def test_parameters_reach_the_model_in_their_types(stub: Any) -> None:
    parameters = {"text": "x", "flag": True, "number": -3, "triton_enable_empty_final_response": True, "priority": 1}
    response = await stub.ModelInfer(request(parameters=parameters))

    (row,) = answer_of(blocking_client.InferResult(response)).seen.rows
    assert row.document["parameters"] == {"text": "x", "flag": True, "number": -3}


@pytest.mark.parametrize("number", [-5, -(1 << 63), (1 << 63) - 1])
async def test_a_negative_sequence_id_is_one_beyond_int64(stub: Any, number: int) -> None:
    response = await stub.ModelInfer(request("corrid_uint64", parameters={**SEQUENCE, "sequence_id": number}))

    (row,) = answer_of(blocking_client.InferResult(response)).seen.rows
    assert number % (1 << 64) == row.value("CORRID")


CONTENTS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, (1 << 32) - 1]),
    "UINT64": ("uint64_contents", [0, (1 << 64) - 1]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-(1 << 31), (1 << 31) - 1]),
    "INT64": ("int64_contents", [-(1 << 63), (1 << 63) - 1]),
    "FP32": ("fp32_contents", [0.5, -1.5]),
    "FP64": ("fp64_contents", [0.1, -1e300]),
    "BYTES": ("bytes_contents", [b"", "\u00e9\0x".encode()]),
}


async def test_typed_contents_of_every_type_come_back_raw(stub: Any) -> None:
    """8 and 16 bit numbers travel in the fields of 32 bit ones."""
    made = pb.ModelInferRequest(model_name="dtypes")
    for datatype, (field, values) in CONTENTS.items():
        name = "STRING" if datatype == "BYTES" else datatype
        tensor = made.inputs.add(name=name, datatype=datatype, shape=[1, 2])
        tensor.contents.CopyFrom(pb.InferTensorContents(**{field: values}))

    response = await stub.ModelInfer(made)

    outputs = answer_of(blocking_client.InferResult(response)).outputs
    found = {name.removesuffix("_ECHO"): array.reshape(-1).tolist() for name, array in outputs.items()}
    assert found == {("STRING" if name == "BYTES" else name): values for name, (_, values) in CONTENTS.items()}
    assert not any(output.HasField("contents") for output in response.outputs)


async def test_tensors_of_tens_of_megabytes_pass_both_ways(stub: Any) -> None:
    """20 MB, in one call and in a stream."""
    numbers = np.arange(10_000_000, dtype=np.uint16)[None].view(np.float16)
    made = pb.ModelInferRequest(model_name="tensors", id="large")
    made.inputs.add(name="HALF", datatype="FP16", shape=numbers.shape)
    made.raw_input_contents.append(numbers.tobytes())
    made.outputs.add(name="HALF_ECHO")

    response = await stub.ModelInfer(made)
    (message,) = await streamed(stub, made)

    assert numbers.tobytes() == response.raw_output_contents[0]
    assert numbers.tobytes() == message.infer_response.raw_output_contents[0]


async def test_classes_are_asked_for_by_output(stub: Any) -> None:
    response = await stub.ModelInfer(request(outputs={"OUTPUT": {"classification": 1}}))

    (output,) = response.outputs
    assert ("BYTES", [1, 1]) == (output.datatype, list(output.shape))
    assert [b"\3\0\0\0005:0"] == list(response.raw_output_contents)


async def test_an_output_that_is_asked_for_twice_comes_once_with_its_first_classes(stub: Any) -> None:
    made = request(outputs={"OUTPUT": {}})
    for classes in (1, 2):
        put(made.outputs.add(name="OUTPUT").parameters, {"classification": classes})

    response = await stub.ModelInfer(made)

    assert [("OUTPUT", "BYTES", [1, 1])] == [(o.name, o.datatype, list(o.shape)) for o in response.outputs]
    assert [b"\3\0\0\0005:0"] == list(response.raw_output_contents)


@pytest.mark.mesh_only("classes of a BYTES output kill the server there")
async def test_classes_of_texts_are_refused(stub: Any) -> None:
    code, _ = await status_of(stub.ModelInfer(request(outputs={"SEEN": {"classification": 1}})))

    assert code == "INVALID_ARGUMENT"
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live


# -- the other rpcs ---------------------------------------------------------------------------------------------------


async def test_server_and_models_say_who_they_are(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    ready = {
        name: (await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready
        for name, version in (("direct", ""), ("oldest", "1"), ("rows", "2"), ("nope", ""))
    }
    server = await stub.ServerMetadata(pb.ServerMetadataRequest())
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="direct"))
    config = (await stub.ModelConfig(pb.ModelConfigRequest(name="oldest", version="1"))).config

    assert ready == {"direct": True, "oldest": True, "rows": False, "nope": False}
    assert server.name == "triton"
    assert {"classification", "sequence", "schedule_policy", "binary_tensor_data", "parameters"} <= {*server.extensions}
    assert ("direct", ["1"], "python") == (model.name, list(model.versions), model.platform)
    assert [("INPUT", "INT32", [-1, 1])] == [(t.name, t.datatype, list(t.shape)) for t in model.inputs]
    assert [("OUTPUT", [-1, 1]), ("SEEN", [-1, 1])] == [(t.name, list(t.shape)) for t in model.outputs]
    assert ("oldest", 4, 4) == (
        config.name,
        config.max_batch_size,
        config.sequence_batching.oldest.max_candidate_sequences,
    )


@pytest.mark.parametrize(
    ("rpc", "fields", "code", "text"),
    [
        ("ModelReady", {"name": "direct", "version": "x"}, "INVALID_ARGUMENT", "failed to get model version from"),
        (
            "ModelMetadata",
            {"name": "direct", "version": "0"},
            "NOT_FOUND",
            "Request for unknown model: 'direct' version 0 is not found",
        ),
        ("ModelMetadata", {"name": "nope"}, "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        (
            "ModelMetadata",
            {"name": "direct", "version": "2"},
            "NOT_FOUND",
            "Request for unknown model: 'direct' version 2 is not found",
        ),
        ("ModelConfig", {"name": "nope"}, "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        ("ModelStatistics", {"name": "nope"}, "INVALID_ARGUMENT", "requested model 'nope' is not available"),
        (
            "ModelStatistics",
            {"name": "direct", "version": "2"},
            "INVALID_ARGUMENT",
            "requested model version is not available for model 'direct'",
        ),
        (
            "RepositoryIndex",
            {"repository_name": "x"},
            "UNIMPLEMENTED",
            "'repository_name' specification is not supported",
        ),
        (
            "RepositoryModelLoad",
            {"repository_name": "x", "model_name": "y"},
            "UNIMPLEMENTED",
            "'repository_name' specification is not supported",
        ),
        (
            "RepositoryModelUnload",
            {"repository_name": "x", "model_name": "y"},
            "UNIMPLEMENTED",
            "'repository_name' specification is not supported",
        ),
        (
            "SystemSharedMemoryStatus",
            {"name": "x"},
            "NOT_FOUND",
            "Unable to find system shared memory region: 'x'",
        ),
        ("CudaSharedMemoryStatus", {"name": "x"}, "NOT_FOUND", "Unable to find cuda shared memory region: 'x'"),
    ],
)
async def test_questions_that_have_no_answer(stub: Any, rpc: str, fields: dict[str, str], code: str, text: str) -> None:
    found, said = await status_of(getattr(stub, rpc)(getattr(pb, f"{rpc}Request")(**fields)))

    assert code == found
    assert said.startswith(text)


@pytest.mark.parametrize("version", ["1", "7"])
async def test_a_version_of_no_model_does_not_choose_statistics(stub: Any, version: str) -> None:
    response = await stub.ModelStatistics(pb.ModelStatisticsRequest(version=version))

    assert {"direct", "oldest", "rows"} <= {entry.name for entry in response.model_stats}


async def test_a_repository_lists_its_models(stub: Any) -> None:
    everything = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
    ready = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))

    for index in (everything, ready):
        assert ("direct", "1", "READY", "") in [(m.name, m.version, m.state, m.reason) for m in index.models]


@pytest.mark.parametrize("kind", ["System", "Cuda"])
async def test_no_region_of_shared_memory_is_there_and_unregistering_is_harmless(stub: Any, kind: str) -> None:
    def call(rpc: str, **fields: str) -> Any:
        name = f"{kind}SharedMemory{rpc}"
        return getattr(stub, name)(getattr(pb, f"{name}Request")(**fields))

    assert not (await call("Status")).regions
    await call("Unregister")
    await call("Unregister", name="x")


@pytest.mark.mesh_only("2.51 is built for GPUs")
async def test_cuda_memory_is_refused_in_the_words_of_a_build_without_gpus(stub: Any) -> None:
    code, text = await status_of(
        stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="x", raw_handle=b"x", byte_size=4))
    )

    assert ("UNIMPLEMENTED", "failed to register CUDA shared memory region: 'x', GPUs not supported") == (code, text)


async def test_health_of_the_server_and_its_service(target: Target) -> None:
    messages: Any = health_pb2
    stubs: Any = health_pb2_grpc
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        for service in ("", "inference.GRPCInferenceService"):
            response = await stubs.HealthStub(channel).Check(messages.HealthCheckRequest(service=service))
            assert messages.HealthCheckResponse.SERVING == response.status


@pytest.mark.differs("the health protocol has NOT_FOUND for it; Triton is SERVING whatever it is asked for")
async def test_health_of_a_service_that_is_not_there(target: Target) -> None:
    messages: Any = health_pb2
    stubs: Any = health_pb2_grpc
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        check = stubs.HealthStub(channel).Check(messages.HealthCheckRequest(service="other"))
        if target.is_mesh:
            with pytest.raises(grpc.aio.AioRpcError, match="unknown service 'other'") as caught:
                await check
            assert grpc.StatusCode.NOT_FOUND == caught.value.code()
        else:
            assert messages.HealthCheckResponse.SERVING == (await check).status


# -- streams ----------------------------------------------------------------------------------------------------------


START_NEEDED = "inference request for sequence {} to model 'direct' must specify the START flag on the first request"


async def test_answers_and_errors_of_all_models_come_in_the_order_of_their_requests(target: Target, gate: Gate) -> None:
    """The first is held; those behind it are ready before it, refusals at once, and wait."""
    one, other = neighbours("direct", 2)
    async with Stream(target, "stateless") as stream:
        stream.send(
            Step(fresh_id(), model="oldest", request_id="0", start=True, end=True, parameters=gate.parameters),
            Step(request_id="1", value=7),
            Step(other, model="direct", request_id="2"),
            Step(request_id="3", parameters={"fail": "it failed"}),
            Step(one, model="direct", request_id="4", start=True, end=True),
            Step(model="nope", request_id="5"),
            Step(request_id="6"),
        )
        await gate.entered()
        gate.open()
        answers = [answer if isinstance(answer, str) else answer.request_id for answer in await received(stream, 7)]

    assert [
        "0",
        "1",
        START_NEEDED.format(other) + " of the sequence",
        "it failed",
        "4",
        "Request for unknown model: 'nope' is not found",
        "6",
    ] == answers


async def received(stream: Stream, count: int) -> list[Answer | str]:
    """So many answers, errors as their texts (with a status if it is the whole stream's)."""
    answers: list[Answer | str] = []
    for _ in range(count):
        try:
            answers.append(await stream.receive())
        except Refused as error:
            answers.append(f"{error.status}{error.message}")
    return answers


async def test_the_failure_of_an_accepted_request_is_a_final_answer(stub: Any) -> None:
    failed, answered = await streamed(stub, request(id="bad", parameters={"fail": "it failed"}), request(id="good"))

    assert ("it failed", "bad") == (failed.error_message, failed.infer_response.id)
    assert failed.infer_response.model_name == "stateless"
    assert failed.infer_response.parameters["triton_final_response"].bool_param
    assert ("", "good") == (answered.error_message, answered.infer_response.id)


@pytest.mark.parametrize("value", ["True", "1", "false"])
async def test_any_other_value_leaves_failures_in_the_stream(stub: Any, value: str) -> None:
    failing = request(id="bad", parameters={"fail": "it failed"})

    (failed,) = await streamed(stub, failing, metadata=(("triton_grpc_error", value),))

    assert ("it failed", "bad") == (failed.error_message, failed.infer_response.id)


async def test_on_request_the_failure_of_a_model_ends_the_stream_with_its_status(stub: Any) -> None:
    call = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await call.write(request("nope", id="refused"))
    await call.write(request(id="bad", parameters={"fail": "it failed"}))
    async with asyncio.timeout(PATIENCE_S):
        refused_one = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert ("Request for unknown model: 'nope' is not found", "refused") == (
        refused_one.error_message,
        refused_one.infer_response.id,
    )
    assert ("INTERNAL", "it failed") == (caught.value.code().name, caught.value.details())


async def test_a_half_closed_stream_is_answered_to_the_end(target: Target, gate: Gate) -> None:
    async with Stream(target, "stateless") as stream:
        stream.send(Step(request_id="0", parameters=gate.parameters), *(Step(request_id=f"{n}") for n in range(1, 4)))
        stream.half_close()
        await gate.entered()
        gate.open()
        rest = [answer async for answer in stream.rest()]

    assert ["0", "1", "2", "3"] == [answer.request_id for answer in rest if isinstance(answer, Answer)]


async def test_a_cancelled_stream_is_one_error_and_leaves_the_sequence_usable(target: Target, gate: Gate) -> None:
    """What runs goes on; nothing is said of it. With no request in flight, another connection takes the sequence on."""
    identity = fresh_id()
    errors: queue.Queue[str] = queue.Queue()

    def callback(result: Any, error: Any) -> None:
        errors.put("answer" if error is None else str(error.status()))

    client: Any = blocking_client.InferenceServerClient(target.grpc)
    try:
        client.start_stream(callback)
        await asyncio.to_thread(send_blocking, client, Step(identity, 5, start=True, parameters=gate.parameters))
        await gate.entered()
        await asyncio.to_thread(client.stop_stream, cancel_requests=True)
        assert ["StatusCode.CANCELLED"] == [errors.get_nowait() for _ in range(errors.qsize())]
        gate.open()
        async with Stream(target, "direct") as stream:
            stream.send(Step(identity, 6, end=True))
            last = await stream.receive()
    finally:
        client.close()

    assert last.total == 11


def send_blocking(client: Any, step: Step) -> None:
    """A step by the client that has a callback."""
    arguments = replace(step, model="direct").arguments(blocking_client)
    client.async_stream_infer(**{name: value for name, value in arguments.items() if name != "timeout"})


@pytest.mark.mesh_only("2.51 crashes now and then under 64 to 128 streams of sequences")
async def test_128_streams_of_sequences_at_a_time(target: Target) -> None:
    """Each stream writes its whole sequence at once; the slots do not suffice for all, so some wait."""
    values = range(1, 9)

    async def play() -> list[int]:
        identity = fresh_id()
        async with Stream(target, "crowd") as stream:
            stream.send(*(Step(identity, value, start=value == values[0], end=value == values[-1]) for value in values))
            return [answer.total for answer in await stream.answers(len(values))]

    found = await asyncio.gather(*(play() for _ in range(128)))

    assert [list(itertools.accumulate(values))] * 128 == found


# -- options ----------------------------------------------------------------------------------------------------------


async def test_restricted_parts_answer_to_those_who_know_the_key(make_target: MakeTarget) -> None:
    option = "model-repository,health:admin-key=secret"
    target = make_target(["stateless"], options={"grpc-restricted-protocol": option})
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
    key = (("triton-grpc-protocol-admin-key", "secret"),)
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        stubs: Any = service_pb2_grpc
        stub = stubs.GRPCInferenceServiceStub(channel)
        index = pb.RepositoryIndexRequest()

        assert ("UNAVAILABLE", text) == await status_of(stub.RepositoryIndex(index))
        assert ("UNAVAILABLE", text) == await status_of(stub.ServerLive(pb.ServerLiveRequest()))
        wrong = stub.RepositoryIndex(index, metadata=(("triton-grpc-protocol-admin-key", "guess"),))
        assert ("UNAVAILABLE", text) == await status_of(wrong)
        assert (await stub.ServerLive(pb.ServerLiveRequest(), metadata=key)).live
        assert ["stateless"] == [model.name for model in (await stub.RepositoryIndex(index, metadata=key)).models]
        await stub.ModelInfer(request())
