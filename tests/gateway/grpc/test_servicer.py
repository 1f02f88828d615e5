"""Every rpc, driven by the ordinary client; errors by the one table; nothing without a meaning answers silently."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from tritonclient import grpc as triton_grpc
from tritonclient.grpc import aio as triton_grpc_aio
from tritonclient.utils import InferenceServerException

from gateway.grpc import codec
from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer
from gateway.grpc.servicer import InferenceServicer
from gateway.models.metadata import EXTENSIONS
from gateway.requests.classification import classified
from gateway.requests.status import GRPC_STATUS
from shared.contract.errors import Code, MeshError, ModelError, Reason, SequenceError, UnavailableError
from shared.contract.messages import ModelRecord
from shared.contract.tensors import Tensor
from tests.gateway.one_at_a_time import one_at_a_time

# The clients have no types.
triton: Any = triton_grpc
triton_aio: Any = triton_grpc_aio


@pytest.fixture
def address(rpc_server: GrpcServer) -> str:
    return f"127.0.0.1:{rpc_server.port}"


def tensor(values: Any, datatype: str) -> Any:
    array = np.array(values, dtype=object if datatype == "BYTES" else triton_type(datatype))
    made = triton.InferInput("INPUT", list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def triton_type(datatype: str) -> Any:
    return {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}[datatype]


def request(**fields: Any) -> Any:
    made = pb.ModelInferRequest(model_name="sum", **fields)
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1], contents=pb.InferTensorContents(int_contents=[5]))
    return made


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# -- inference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "datatype"),
    [([[1, -2]], "INT32"), ([1.5], "FP32"), ([[True], [False]], "BOOL"), ([b"text", "täxt".encode(), b""], "BYTES")],
)
async def test_tritonclient_infers(address: str, twin: Any, values: Any, datatype: str) -> None:
    def infer() -> tuple[Any, Any]:
        with triton.InferenceServerClient(address) as client:
            result = client.infer(
                "sum", [tensor(values, datatype)], request_id="r1", sequence_id="text", sequence_start=True, priority=2
            )
            return result.get_response(), result.as_numpy("OUTPUT0")

    response, output = await asyncio.to_thread(infer)

    assert values == output.tolist()
    assert (response.model_name, response.model_version, response.id) == ("sum", "1", "r1")
    assert "triton_final_response" not in response.parameters  # a stream's parameter
    (call,) = twin.calls
    assert ("text", True, False, 2) == (call.correlation_id, call.start, call.end, call.priority)


@pytest.mark.parametrize(("count", "is_beside"), [(8, False), (2048, True)])
async def test_what_takes_long_to_classify_is_classified_beside_the_loop(
    address: str, monkeypatch: pytest.MonkeyPatch, count: int, is_beside: bool
) -> None:
    """An element takes microseconds, whatever its bytes are."""
    threads: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        threads.append(threading.get_ident())
        return classified(*arguments)

    monkeypatch.setattr("gateway.grpc.codec.classified", noted)
    async with triton_aio.InferenceServerClient(address) as client:
        outputs = [triton.InferRequestedOutput("OUTPUT0", class_count=count)]
        inputs = [tensor([[0.5] * count], "FP32")]
        result = await client.infer("sum", inputs, outputs=outputs)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "sum", "inputs": inputs, "outputs": outputs}

        async for streamed, error in client.stream_infer(requests()):
            assert error is None
            assert result.as_numpy("OUTPUT0").tolist() == streamed.as_numpy("OUTPUT0").tolist()

    assert [is_beside] * 2 == [thread != threading.get_ident() for thread in threads]


async def test_answers_are_classified_one_at_a_time_also_those_of_clients_that_have_left(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further thread would only keep the event loop waiting, and nothing ends one whose client has left."""
    outputs = [triton.InferRequestedOutput("OUTPUT0", class_count=2048)]
    inputs = [tensor([[0.5] * 2048], "FP32")]
    with one_at_a_time(monkeypatch, codec, "classified") as threads:
        async with triton_aio.InferenceServerClient(address) as client:

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "sum", "inputs": inputs, "outputs": outputs}

            async def streamed() -> list[Any]:
                return [error async for _, error in client.stream_infer(requests())]

            leaving = [asyncio.create_task(client.infer("sum", inputs, outputs=outputs)) for _ in range(4)]
            async with asyncio.timeout(60):
                while not threads:
                    await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            staying = [client.infer("sum", inputs, outputs=outputs) for _ in range(4)]
            _, *errors = await asyncio.gather(asyncio.gather(*staying), streamed(), streamed())
            await asyncio.wait(leaving)

    assert [[None], [None]] == errors
    assert 6 < len(threads)


async def test_tritonclient_infers_with_callbacks(address: str) -> None:
    def infer() -> list[int]:
        results: queue.Queue[Any] = queue.Queue()

        def callback(result: Any, error: InferenceServerException | None) -> None:
            results.put(error or int(result.as_numpy("OUTPUT0")[0]))

        with triton.InferenceServerClient(address) as client:
            for number in range(8):
                client.async_infer("sum", [tensor([number], "INT32")], callback=callback)
            return sorted(results.get(timeout=60) for _ in range(8))

    assert list(range(8)) == await asyncio.to_thread(infer)


async def test_tritonclient_aio_infers(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        results = await asyncio.gather(*(client.infer("sum", [tensor([n], "INT32")]) for n in range(8)))

    assert list(range(8)) == [int(result.as_numpy("OUTPUT0")[0]) for result in results]


async def test_typed_contents_are_answered_raw(stub: Any) -> None:
    response = await stub.ModelInfer(request())

    assert response.raw_output_contents == [b"\5\0\0\0"]
    assert not response.outputs[0].HasField("contents")


async def test_a_callers_session_and_trace_context_are_taken_from_metadata_and_the_session_is_returned(
    stub: Any, twin: Any
) -> None:
    call = stub.ModelInfer(
        request(), metadata=(("inference-session-id", "session_abc"), ("traceparent", "00-01-02-01"))
    )
    await call

    assert ("inference-session-id", "session_abc") in tuple(await call.trailing_metadata())
    assert twin.calls[0].session_id == "session_abc"
    assert twin.calls[0].trace_headers == {"traceparent": "00-01-02-01"}


@pytest.mark.parametrize("entry", [("note", " a space at both ends "), ("host", "other"), ("connection", "close")])
async def test_metadata_that_http_2_forbids_is_taken_and_harms_no_call_beside_it(
    stub: Any, twin: Any, entry: tuple[str, str]
) -> None:
    """gRPC's own clients let it through, and all calls of a channel have one connection."""
    twin.respond = twin.hold
    beside = stub.ModelInfer(request())
    await twin.wait_for_calls(1)

    assert (await stub.ServerLive(pb.ServerLiveRequest(), metadata=(entry,))).live
    twin.finish(0)
    assert (await beside).model_name == "sum"


@pytest.mark.parametrize("size", [70_000, 200_000])
async def test_metadata_that_is_too_large_costs_its_own_call_alone(stub: Any, twin: Any, size: int) -> None:
    """gRPC's core sends more than the server says it takes."""
    twin.respond = twin.hold
    beside = stub.ModelInfer(request())
    await twin.wait_for_calls(1)

    error = await status_of(stub.ServerLive(pb.ServerLiveRequest(), metadata=(("note", size * "n"),)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    twin.finish(0)
    assert (await beside).model_name == "sum"


async def test_a_caller_who_leaves_abandons_the_answer(stub: Any, twin: Any) -> None:
    twin.respond = twin.hold
    call = stub.ModelInfer(request())
    await twin.wait_for_calls(1)

    call.cancel()

    async with asyncio.timeout(60):
        await asyncio.wait(twin.futures)
    assert twin.futures[0].cancelled()


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(Code))
async def test_every_code_has_its_status(stub: Any, twin: Any, code: Code) -> None:
    twin.fail(MeshError("what happened", code))

    error = await status_of(stub.ModelInfer(request()))

    assert GRPC_STATUS[code] == error.code().name
    assert error.details() == "what happened"


async def test_a_sequence_error_says_why_and_how_far_the_sequence_came(stub: Any, twin: Any) -> None:
    twin.fail(SequenceError("the sequence has expired", Reason.EXPIRED, 12))

    error = await status_of(stub.ModelInfer(request()))

    trailing = dict(error.trailing_metadata() or ())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("expired", "12") == (trailing["seqmesh-reason"], trailing["seqmesh-last-step"])
    rich = Status.FromString(cast("bytes", trailing["grpc-status-details-bin"]))
    assert (error.code().value[0], error.details()) == (rich.code, rich.message)
    info = ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert ("EXPIRED", "seqmesh", {"last_step": "12", "retry": "start"}) == (
        info.reason,
        info.domain,
        dict(info.metadata),
    )


async def test_a_sequence_error_with_a_long_text_has_no_details_but_its_metadata(stub: Any, twin: Any) -> None:
    twin.fail(SequenceError("ä" * 1500, Reason.ANSWERED, 3))

    error = await status_of(stub.ModelInfer(request()))

    trailing = dict(error.trailing_metadata() or ())
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "answered" == trailing["seqmesh-reason"]
    assert "grpc-status-details-bin" not in trailing


@pytest.mark.parametrize("unit", ["x" * 100 + "\n", "ä" * 50, "%" * 100])
async def test_a_text_too_long_for_a_header_arrives_shortened(stub: Any, twin: Any, unit: str) -> None:
    """Headers beyond 8 KiB are refused by clients, and with them the whole error."""
    twin.fail(ModelError("beginning " + unit * 1000 + " end"))

    error = await status_of(stub.ModelInfer(request()))

    assert error.code() is grpc.StatusCode.INTERNAL
    assert (error.details() or "").startswith("beginning")
    assert (error.details() or "").endswith("end")
    assert " [...] " in (error.details() or "")


async def test_tritonclient_raises_with_the_servers_words(address: str, twin: Any) -> None:
    twin.fail(UnavailableError("try again later"))

    def infer() -> InferenceServerException:
        with triton.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as caught:
            client.infer("sum", [tensor([1], "INT32")])
        return caught.value

    error = await asyncio.to_thread(infer)

    assert ("StatusCode.UNAVAILABLE", "try again later") == (error.status(), error.message())


async def test_a_request_that_cannot_be_decoded_is_an_invalid_argument(stub: Any, twin: Any) -> None:
    made = request(raw_input_contents=[b"\0\0\0\0"])

    error = await status_of(stub.ModelInfer(made))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "contents field must not be specified" in (error.details() or "")
    assert twin.calls == []


# -- server and models ----------------------------------------------------------------------------------------------


async def test_the_server_is_live_and_as_ready_as_the_mesh(address: str, catalog: Any) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()

        catalog.serves = False

        assert await client.is_server_live()
        assert not await client.is_server_ready()


@pytest.mark.parametrize(("model", "version", "expected"), [("sum", "", True), ("sum", "1", True), ("sum", "2", False)])
async def test_a_model_is_ready_where_somebody_serves_it(
    address: str, model: str, version: str, expected: bool
) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert expected is await client.is_model_ready(model, version)


async def test_an_unknown_model_is_not_ready_rather_than_an_error(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert not await client.is_model_ready("unknown")


async def test_server_metadata_names_the_extensions(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        metadata = await client.get_server_metadata()

    assert metadata.name == "triton"
    assert list(EXTENSIONS) == list(metadata.extensions)


async def test_model_metadata_shows_the_batch_dimension(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        metadata = await client.get_model_metadata("sum")

    assert ("sum", ["1"], "python") == (metadata.name, list(metadata.versions), metadata.platform)
    assert [("INPUT", "INT32", [-1, 1])] == [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs]
    assert [("OUTPUT", "INT32", [-1, 1])] == [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs]


async def test_a_models_configuration_is_the_real_message(
    address: str, catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, versions = catalog.record("sum")
    config_json = (
        '{"name":"sum","backend":"python","max_batch_size":8,"sequence_batching":{"max_sequence_idle_microseconds":5}}'
    )

    def changed(*_: str) -> tuple[ModelRecord, tuple[str, ...]]:
        return ModelRecord(record.config, config_json, versions), versions

    monkeypatch.setattr(catalog, "record", changed)

    async with triton_aio.InferenceServerClient(address) as client:
        config = (await client.get_model_config("sum")).config

    assert ("sum", "python", 8) == (config.name, config.backend, config.max_batch_size)
    assert config.sequence_batching.max_sequence_idle_microseconds == 5


async def test_statistics_are_reported_per_version_and_batch_size(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        (entry,) = (await client.get_inference_statistics()).model_stats

    assert ("sum", "1", 1700000000000) == (entry.name, entry.version, entry.last_inference)
    assert (entry.inference_count, entry.execution_count) == (8, 2)
    assert (entry.inference_stats.success.count, entry.inference_stats.success.ns) == (8, 900)
    assert (entry.inference_stats.fail.count, entry.inference_stats.cache_hit.count) == (0, 0)
    assert [(4, 2, 20)] == [(b.batch_size, b.compute_infer.count, b.compute_infer.ns) for b in entry.batch_stats]


@pytest.mark.parametrize("rpc", ["ModelMetadata", "ModelConfig", "ModelStatistics"])
async def test_questions_about_an_unknown_model_are_errors(stub: Any, rpc: str) -> None:
    error = await status_of(getattr(stub, rpc)(getattr(pb, f"{rpc}Request")(name="unknown")))

    assert error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    assert "'unknown'" in (error.details() or "")


# -- repository -----------------------------------------------------------------------------------------------------


async def test_the_repository_index_lists_every_version_or_the_ready_ones(stub: Any, address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        index = await client.get_model_repository_index()
    ready = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))

    assert [("other", "2", "UNAVAILABLE", "unloaded"), ("sum", "1", "READY", "")] == [
        (entry.name, entry.version, entry.state, entry.reason) for entry in index.models
    ]
    assert ["sum"] == [entry.name for entry in ready.models]


async def test_load_and_unload_reach_the_repository(address: str, repository: Any) -> None:
    config = '{"backend": "python"}'
    async with triton_aio.InferenceServerClient(address) as client:
        await client.load_model("sum")
        await client.load_model("sum", config=config, files={"file:1/model.py": b"code"})
        await client.unload_model("sum", unload_dependents=True)

    assert [
        ("load", "sum", None, {}),
        ("load", "sum", config, {"1/model.py": b"code"}),
        ("unload", "sum"),
    ] == repository.done


async def test_a_load_that_fails_says_why(stub: Any) -> None:
    error = await status_of(stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="broken")))

    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "failed to load 'broken', failed to poll from model repository"


@pytest.mark.parametrize(
    ("rpc", "key", "choice", "message"),
    [
        ("Load", "config", {"bool_param": True}, "'config', expected string_param."),
        ("Load", "file:1/model.py", {"string_param": "x"}, "'file:1/model.py', expected bytes_param."),
        ("Load", "other", {"bool_param": True}, "unrecognized load parameter 'other'."),
        ("Unload", "unload_dependents", {"int64_param": 1}, "'unload_dependents' parameter, expected bool_param."),
    ],
)
async def test_repository_parameters_have_their_types(
    stub: Any, repository: Any, rpc: str, key: str, choice: dict[str, Any], message: str
) -> None:
    made = getattr(pb, f"RepositoryModel{rpc}Request")(model_name="sum")
    made.parameters[key].CopyFrom(pb.ModelRepositoryParameter(**choice))

    error = await status_of(getattr(stub, f"RepositoryModel{rpc}")(made))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (error.details() or "")
    assert repository.done == []


@pytest.mark.parametrize("rpc", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
async def test_there_is_one_repository(stub: Any, rpc: str) -> None:
    error = await status_of(getattr(stub, rpc)(getattr(pb, f"{rpc}Request")(repository_name="second")))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "'repository_name' specification is not supported"


# -- without a meaning ----------------------------------------------------------------------------------------------


def test_every_rpc_of_the_service_is_answered() -> None:
    """A new rpc in tritonclient's service must be decided on, not inherited as 'Method not implemented!'."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    assert [] == [method.name for method in service.methods if method.name not in vars(InferenceServicer)]


@pytest.mark.parametrize("kind", ["System", "Cuda"])
async def test_there_is_no_region_of_shared_memory_and_none_to_unregister(stub: Any, kind: str) -> None:
    def asking(rpc: str, **fields: Any) -> Any:
        name = f"{kind}SharedMemory{rpc}"
        return getattr(stub, name)(getattr(pb, f"{name}Request")(**fields))

    assert not (await asking("Status")).regions
    await asking("Unregister")
    await asking("Unregister", name="mine")
    error = await status_of(asking("Status", name="mine"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == f"Unable to find {kind.lower()} shared memory region: 'mine'"


@pytest.mark.parametrize(
    ("rpc", "reason"),
    [
        ("SystemSharedMemoryRegister", "Client shared memory is disabled"),
        ("CudaSharedMemoryRegister", "GPUs not supported"),
    ],
)
async def test_rpcs_without_a_meaning_in_a_mesh_say_why(stub: Any, rpc: str, reason: str) -> None:
    error = await status_of(getattr(stub, rpc)(getattr(pb, f"{rpc}Request")()))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert reason in (error.details() or "")
