"""What `seqmesh seq replay` sends: every request of a journal as it was, in a sequence of its own, and one END."""

from __future__ import annotations

from typing import Any

import click
import grpc
import pytest
from tritonclient.grpc import service_pb2 as _service_pb2
from tritonclient.grpc import service_pb2_grpc as _service_pb2_grpc

from deploy.local.embedded import free_port
from deploy.operate.comparison import ReplayAnswer
from deploy.operate.replaying import Target, replayed
from shared.contract.ids import CorrelationId
from shared.contract.messages import InferMessage, ReplyMessage
from shared.contract.tensors import Tensor
from shared.store.journals import JournaledStep
from tests.client.grpc_serving import served

pb: Any = _service_pb2
Servicer: Any = _service_pb2_grpc.GRPCInferenceServiceServicer
X, Y = Tensor("X", "INT32", (1,), b"\1\0\0\0"), Tensor("Y", "INT32", (1,), b"\2\0\0\0")
FLAGS = ("sequence_start", "sequence_end")


class Recorder(Servicer):
    """A server that remembers what it was asked. It answers a request as told, and all others with Y."""

    def __init__(self, refusals: dict[int, tuple[grpc.StatusCode, str]]) -> None:
        self.asked: list[Any] = []
        self._refusals = refusals

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self.asked.append(request)
        if refusal := self._refusals.get(len(self.asked)):
            context.abort(*refusal)
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version="3")
        answer.outputs.add(name=Y.name, datatype=Y.datatype, shape=Y.shape)
        answer.raw_output_contents.append(Y.raw)
        return answer


def step(correlation_id: CorrelationId, *, failed: bool = False, has_end: bool = False) -> JournaledStep:
    asked = InferMessage("m", "1", "named", correlation_id, (X,), ("Y",), parameters={"colour": "red"})
    return JournaledStep(asked, ReplyMessage("1", error_code="INTERNAL" if failed else ""), has_end)


async def run(recorder: Recorder, *steps: JournaledStep) -> tuple[str, list[ReplayAnswer]]:
    with served(recorder) as address:
        return await replayed(Target(f"grpc://{address}", "other", "2", [("x-token", "t")]), steps)


def told(request: Any) -> tuple[str, int, list[bool]]:
    """Request id, number and flags; 0 for no number."""
    flags = [request.parameters[name].bool_param for name in FLAGS]
    return request.id, request.parameters["sequence_step"].int64_param, flags


async def test_each_request_is_sent_as_it_was_and_the_last_one_once_more_with_end() -> None:
    recorder = Recorder({})

    version, answers = await run(recorder, step("a text"), step("a text"))

    assert ("3", [ReplayAnswer((Y,))] * 2) == (version, answers)
    # One that is open is ended without an id and a number: as a step of its own, and no repetition of the last.
    expected = [("named", 1, [True, False]), ("named", 2, [False, False]), ("", 0, [False, True])]
    assert expected == [told(request) for request in recorder.asked]
    for request in recorder.asked:
        assert ("other", "2") == (request.model_name, request.model_version)
        assert "red" == request.parameters["colour"].string_param
        assert request.parameters["sequence_id"].string_param.startswith("replay-")
        assert [X.raw] == list(request.raw_input_contents)
        assert ["Y"] == [output.name for output in request.outputs]
    assert 1 == len({request.parameters["sequence_id"].string_param for request in recorder.asked})


async def test_a_gateway_of_the_mesh_is_reached_past_the_proxies_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with served(recorder := Recorder({})) as address:
        _, answers = await replayed(Target(f"grpc://{address}", "m", "", is_direct=True), [step(7, has_end=True)])
        with pytest.raises(click.ClickException, match="step 1 is not taken"):
            await replayed(Target(f"grpc://{address}", "m", ""), [step(7, has_end=True)])

    assert ([ReplayAnswer((Y,))], 1) == (answers, len(recorder.asked))


async def test_a_sequence_whose_end_was_answered_is_not_ended_again() -> None:
    recorder = Recorder({})

    await run(recorder, step(7), step(7, has_end=True))

    assert [[True, False], [False, True]] == [told(request)[2] for request in recorder.asked]
    # A number that fits into each type that a model may want it in.
    assert 1 << 30 <= recorder.asked[0].parameters["sequence_id"].int64_param < 1 << 31


async def test_a_failure_of_the_model_is_an_answer_and_one_that_is_new_ends_the_sequence() -> None:
    recorder = Recorder({1: (grpc.StatusCode.INTERNAL, "no"), 2: (grpc.StatusCode.INVALID_ARGUMENT, "not this")})

    _, answers = await run(recorder, step(7, failed=True), step(7), step(7))

    assert [ReplayAnswer(error="no"), ReplayAnswer(error="not this")] == answers
    assert [[True, False], [False, False], [False, True]] == [told(request)[2] for request in recorder.asked]


@pytest.mark.parametrize("has_end", [False, True])
async def test_a_step_that_is_not_taken_is_no_answer_and_the_sequence_is_ended(has_end: bool) -> None:
    recorder = Recorder({2: (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")})

    with pytest.raises(click.ClickException, match=r"step 2 is not taken \(RESOURCE_EXHAUSTED\): full"):
        await run(recorder, step(7), step(7, has_end=has_end))

    assert ("", 0, [False, True]) == told(recorder.asked[-1])
    assert 3 == len(recorder.asked)
