"""The gateway driven by the real tritonclient, against a fake executor."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as blocking_client
import tritonclient.http.aio as client
from tritonclient.utils import InferenceServerException

from gateway.requests.classification import classified
from shared.contract.tensors import Tensor
from tests.gateway.fake_executor import FakeExecutor, RunningGateway


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> Any:
    made = client.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def step(value: int, *, binary: bool = True) -> list[Any]:
    return [tensor("INPUT", np.array([[value]], dtype=np.int32), "INT32", binary=binary)]


@pytest.fixture
async def triton(gateway: RunningGateway):
    async with client.InferenceServerClient(gateway.url) as connected:
        yield connected


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("sequence", [42, "forty-two", 2**64 - 1])
async def test_steps_of_a_sequence_add_up(triton: Any, binary: bool, sequence: int | str):
    sums = []
    for index, value in enumerate([1, 2, 3]):
        result = await triton.infer(
            "running_sum",
            step(value, binary=binary),
            outputs=[client.InferRequestedOutput("OUTPUT", binary_data=binary)],
            sequence_id=sequence,
            sequence_start=index == 0,
            sequence_end=index == 2,
        )
        sums.append(int(result.as_numpy("OUTPUT")[0, 0]))

    assert sums == [1, 3, 6]


async def test_numeric_and_text_id_are_two_sequences(triton: Any):
    for sequence, value in ((7, 1), ("7", 100)):
        await triton.infer("running_sum", step(value), sequence_id=sequence, sequence_start=True)

    result = await triton.infer("running_sum", step(1), sequence_id=7)

    assert int(result.as_numpy("OUTPUT")[0, 0]) == 2


@pytest.mark.parametrize(
    ("model", "datatype", "array"),
    [
        ("echo", "FP32", np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)),
        ("echo", "FP32", np.array([[np.nan, np.inf, -np.inf, 1e30]], dtype=np.float32)),
        ("echo_text", "BYTES", np.array([["", "straße", "x" * 300]], dtype=np.object_)),
        ("echo_bool", "BOOL", np.array([[True, False, True]])),
    ],
    ids=["floats", "non-finite", "text", "bools"],
)
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
async def test_tensors_come_back_unchanged_in_every_form(
    triton: Any, model: str, datatype: str, array: Any, binary_in: bool, binary_out: bool
):
    if datatype == "FP32" and not binary_in and not np.isfinite(array).all():
        pytest.skip("JSON has no form for these that a client could send")

    result = await triton.infer(
        model,
        [tensor("INPUT0", array, datatype, binary=binary_in)],
        outputs=[client.InferRequestedOutput("OUTPUT0", binary_data=binary_out)],
    )

    got = result.as_numpy("OUTPUT0")
    expected = np.char.encode(array.astype(str)).astype(object) if datatype == "BYTES" else array
    assert got.shape == array.shape
    np.testing.assert_array_equal(
        got if got.dtype.kind != "O" or binary_out else np.char.encode(got.astype(str)), expected
    )


async def test_half_floats_travel_only_as_binary_data(triton: Any):
    array = np.array([[1.5, -2.0]], dtype=np.float16)

    result = await triton.infer("echo_half", [tensor("INPUT0", array, "FP16")])

    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported"):
        await triton.infer(
            "echo_half",
            [tensor("INPUT0", array, "FP16")],
            outputs=[client.InferRequestedOutput("OUTPUT0", binary_data=False)],
        )


async def test_only_the_outputs_asked_for_come_back(triton: Any):
    inputs = [tensor(name, np.array([[1, 2, 3, 4]], dtype=np.int32), "INT32") for name in ("INPUT0", "INPUT1")]

    result = await triton.infer("add_sub", inputs, outputs=[client.InferRequestedOutput("OUTPUT1")])

    assert [output["name"] for output in result.get_response()["outputs"]] == ["OUTPUT1"]
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), np.zeros((1, 4), dtype=np.int32))


async def test_request_id_comes_back_and_is_absent_when_there_was_none(triton: Any):
    named = await triton.infer("echo", [tensor("INPUT0", np.ones((1, 1), np.float32), "FP32")], request_id="r-1")
    unnamed = await triton.infer("echo", [tensor("INPUT0", np.ones((1, 1), np.float32), "FP32")])

    assert named.get_response()["id"] == "r-1"
    assert "id" not in unnamed.get_response()
    assert unnamed.get_response()["model_version"] == "1"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compression_both_ways(triton: Any, algorithm: str):
    array = np.zeros((1, 5000), dtype=np.float32)

    result = await triton.infer(
        "echo",
        [tensor("INPUT0", array, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )

    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
async def test_an_answer_is_packed_as_its_client_takes_it(gateway: RunningGateway, encoding: str):
    request = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    url, headers = f"http://{gateway.url}/v2/models/echo/infer", {"Accept-Encoding": encoding}

    async with aiohttp.ClientSession() as session, session.post(url, json=request, headers=headers) as response:
        assert encoding == response.headers.get("Content-Encoding", "identity")
        assert [1.0] == (await response.json())["outputs"][0]["data"]


async def test_classification_gives_the_largest_values_with_their_indexes(triton: Any):
    result = await triton.infer(
        "echo",
        [tensor("INPUT0", np.array([[1, 5, 3.25], [9, 7, 8]], dtype=np.float32), "FP32")],
        outputs=[client.InferRequestedOutput("OUTPUT0", class_count=2)],
    )

    assert [[b"5.000000:1", b"3.250000:2"], [b"9.000000:0", b"8.000000:2"]] == result.as_numpy("OUTPUT0").tolist()


@pytest.mark.parametrize(("count", "is_beside"), [(8, False), (2048, True)])
async def test_what_takes_long_to_classify_is_classified_beside_the_loop(
    triton: Any, monkeypatch: pytest.MonkeyPatch, count: int, is_beside: bool
):
    """An element takes microseconds, whatever its bytes are."""
    threads: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        threads.append(threading.get_ident())
        return classified(*arguments)

    monkeypatch.setattr("gateway.rest.response.classified", noted)
    values = np.zeros((1, count), dtype=np.float32)
    wanted = [client.InferRequestedOutput("OUTPUT0", class_count=count)]
    result = await triton.infer("echo", [tensor("INPUT0", values, "FP32")], outputs=wanted)

    assert (1, count) == result.as_numpy("OUTPUT0").shape
    assert [is_beside] == [thread != threading.get_ident() for thread in threads]


async def test_classification_names_the_classes_that_have_a_name(triton: Any):
    result = await triton.infer(
        "labelled",
        [tensor("INPUT0", np.array([[0.5, 2, 3.25, -1e10], [1, 1, 1, 1]], dtype=np.float32), "FP32")],
        outputs=[client.InferRequestedOutput("OUTPUT0", class_count=9)],
    )

    assert [
        [b"3.250000:2", b"2.000000:1:dog", b"0.500000:0:cat", b"-10000000000.000000:3:bird"],
        [b"1.000000:0:cat", b"1.000000:1:dog", b"1.000000:2", b"1.000000:3:bird"],
    ] == result.as_numpy("OUTPUT0").tolist()


async def test_retry_with_the_same_request_id_gets_the_stored_reply_and_runs_nothing(
    triton: Any, executor: FakeExecutor
):
    sequence = uuid.uuid4().hex
    await triton.infer("running_sum", step(5), sequence_id=sequence, sequence_start=True, request_id="a")
    first = await triton.infer("running_sum", step(5), sequence_id=sequence, request_id="b")
    again = await triton.infer("running_sum", step(5), sequence_id=sequence, request_id="b")

    assert first.as_numpy("OUTPUT").tolist() == again.as_numpy("OUTPUT").tolist() == [[10]]
    assert len(executor.received) == 2


async def test_numbered_steps_are_not_doubled_and_not_skipped(triton: Any, executor: FakeExecutor):
    async def numbered(number: int) -> Any:
        return await triton.infer(
            "running_sum",
            step(1),
            sequence_id="numbered",
            sequence_start=number == 1,
            parameters={"sequence_step": number},
        )

    first = await numbered(1)
    await numbered(2)
    again = await numbered(2)

    assert first.get_response()["parameters"] == {"sequence_step": 1}
    assert again.as_numpy("OUTPUT").tolist() == [[2]]
    assert len(executor.received) == 2
    with pytest.raises(InferenceServerException, match="expects step 3 next, but the request is step 5"):
        await numbered(5)


async def test_many_sequences_at_once_each_keep_their_own_sum_and_share_round_trips(
    triton: Any, executor: FakeExecutor
):
    async def run(sequence: int) -> list[int]:
        sums: list[int] = []
        for index in range(8):
            result = await triton.infer(
                "running_sum", step(sequence), sequence_id=sequence, sequence_start=index == 0, sequence_end=index == 7
            )
            sums.append(int(result.as_numpy("OUTPUT")[0, 0]))
        return sums

    results = await asyncio.gather(*(run(sequence) for sequence in range(1, 33)))

    assert results == [[sequence * (index + 1) for index in range(8)] for sequence in range(1, 33)]
    assert len(executor.received) == 32 * 8


async def test_blocking_client_works_as_well(gateway: RunningGateway):
    def drive() -> tuple[bool, bool, list[list[int]]]:
        with blocking_client.InferenceServerClient(gateway.url) as triton:
            made = blocking_client.InferInput("INPUT", [1, 1], "INT32")
            made.set_data_from_numpy(np.array([[3]], dtype=np.int32))
            result: Any = triton.infer("running_sum", [made], sequence_id=5, sequence_start=True, sequence_end=True)
            output = result.as_numpy("OUTPUT")
            return triton.is_server_live(), triton.is_server_ready(), output.tolist()

    assert (True, True, [[3]]) == await asyncio.to_thread(drive)


async def test_metadata_config_statistics_and_index(triton: Any):
    metadata = await triton.get_model_metadata("running_sum")
    server = await triton.get_server_metadata()
    index = await triton.get_model_repository_index()
    statistics = await triton.get_inference_statistics("running_sum")

    assert metadata == {
        "name": "running_sum",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [-1, 1]}],
        "outputs": [{"name": "OUTPUT", "datatype": "INT32", "shape": [-1, 1]}],
    }
    assert server["name"] == "triton"
    assert "sequence" in server["extensions"]
    assert {"name": "echo", "version": "1", "state": "READY"} in index
    assert [each["name"] for each in statistics["model_stats"]] == ["running_sum"]
    assert (await triton.get_model_config("running_sum"))["name"] == "running_sum"
    assert await triton.is_model_ready("running_sum")
    assert not await triton.is_model_ready("running_sum", "7")
    assert not await triton.is_model_ready("nobody_knows")
