"""gRPC through the whole gateway and the real server: sequences, both ways of naming them, and their errors."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient import grpc as triton_grpc

from gateway.grpc.pb import pb
from tests.gateway.stubs import stub_at

triton: Any = triton_grpc  # the client has no types


def int_input(number: int) -> Any:
    tensor = triton.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[number]], dtype=np.int32))
    return tensor


def request(model: str, number: int, **parameters: Any) -> Any:
    made = pb.ModelInferRequest(model_name=model)
    made.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    made.raw_input_contents.append(number.to_bytes(4, "little"))
    for key, value in parameters.items():
        field = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(made.parameters[key], field, value)
    return made


def total(response: Any) -> int:
    return int.from_bytes(response.raw_output_contents[0], "little")


async def test_interleaved_sequences_of_one_stream_keep_their_sums(gateway: Any) -> None:
    steps = 6

    def stream() -> dict[int, list[int]]:
        results: queue.Queue[Any] = queue.Queue()

        def callback(result: Any, error: Any) -> None:
            results.put(error or result)

        with triton.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as client:
            client.start_stream(callback=callback)
            for step in range(1, steps + 1):
                for sequence in (1, 2, 3):
                    client.async_stream_infer(
                        "running_sum",
                        [int_input(sequence * step)],
                        request_id=f"{sequence}-{step}",
                        sequence_id=sequence,
                        sequence_start=step == 1,
                        sequence_end=step == steps,
                    )
            client.stop_stream()
        sums: dict[int, list[int]] = {1: [], 2: [], 3: []}
        for _ in range(3 * steps):
            result = results.get_nowait()
            sums[int(result.get_response().id.split("-")[0])].append(int(result.as_numpy("OUTPUT")[0, 0]))
        return sums

    expected = {s: [s * n * (n + 1) // 2 for n in range(1, steps + 1)] for s in (1, 2, 3)}

    assert expected == await asyncio.to_thread(stream)


async def test_a_step_without_its_sequence_says_why_in_trailing_metadata(gateway: Any) -> None:
    async with stub_at(gateway.addresses.grpc_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request("running_sum", 1, sequence_id=9))

    error = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(
        "inference request for sequence 9 to model 'running_sum' must specify the START flag on the first request"
    )
    assert dict(error.trailing_metadata() or ())["seqmesh-reason"] == "never_seen"


async def test_a_session_that_the_server_named_goes_on_under_that_name(gateway: Any) -> None:
    """The dialect: no id, no START; the id comes back as metadata and as a response parameter."""
    async with stub_at(gateway.addresses.grpc_port) as stub:
        first = stub.ModelInfer(request("session_sum", 4))
        response = await first
        session = str(dict(tuple(await first.trailing_metadata()))["inference-session-id"])
        second = await stub.ModelInfer(
            request("session_sum", 5, sequence_end=True), metadata=(("inference-session-id", session),)
        )

    assert (4, 9) == (total(response), total(second))
    assert session == response.parameters["sequence_id"].string_param


async def test_an_id_beyond_int64_is_written_as_a_negative_number(gateway: Any) -> None:
    async with stub_at(gateway.addresses.grpc_port) as stub:
        first = await stub.ModelInfer(request("running_sum", 2, sequence_id=-5, sequence_start=True))
        second = await stub.ModelInfer(request("running_sum", 3, sequence_id=-5, sequence_end=True))

    assert (2, 5) == (total(first), total(second))
