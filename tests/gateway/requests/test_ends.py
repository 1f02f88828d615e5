"""The end without a step: a client that knows its run ends it over either protocol, and never another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from gateway.parts import GatewayParts
from gateway.requests.admission import admit
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Accepted, Answer, PendingRequest
from shared.contract.errors import Reason, SequenceError, UnavailableError
from shared.contract.ids import ShardId, sequence_id
from shared.contract.messages import ReplyMessage, encode
from shared.contract.tensors import Tensor
from tests.gateway.fake_executor import FakeExecutor, RunningGateway
from tests.gateway.requests.portless import Proxy, is_submit, step, total
from tests.mesh.raw_http import answer, infer_document, posted
from tests.mesh.traffic import tensor

PATH = "/v2/models/running_sum/infer"


def first_step(value: int, **rest: Any) -> InferCall:
    return step(value, start=True, expected_step=1, run_info=True, **rest)


def close(run: str, sequence: int = 1) -> InferCall:
    return InferCall("running_sum", correlation_id=sequence, ended_run=run)


async def run_of(parts: GatewayParts, call: InferCall) -> str:
    told = (await parts.inference.submit(call)).parameters["sequence_run"]
    assert isinstance(told, str)
    return told


async def test_a_run_is_ended_by_its_name_and_a_later_one_under_the_same_id_is_left_alone(parts: GatewayParts) -> None:
    run = await run_of(parts, first_step(5))
    assert run == await run_of(parts, step(1, expected_step=2, run_info=True))
    assert {"sequence_step": 3} == (await parts.inference.submit(step(1, expected_step=3))).parameters, (
        "asked for alone"
    )

    for _ in range(2):
        ended = await parts.inference.submit(close(run))
        assert ((), "1", {}) == (ended.message.outputs, ended.version, ended.parameters)
    with pytest.raises(SequenceError) as refused:
        await parts.inference.submit(step(1, expected_step=4))
    assert Reason.CANCELLED == refused.value.reason

    # A START while the record of the ended run is still there, and one that goes on with an open sequence.
    second = await run_of(parts, first_step(7))
    third = await run_of(parts, step(9, start=True, run_info=True))
    assert 3 == len({run, second, third})
    for old in (run, second, "nonsense"):
        await parts.inference.submit(close(old))
    assert 10 == total(await parts.inference.submit(step(1, expected_step=2)))


async def test_an_answer_that_overtakes_the_acceptance_waits_for_the_name_of_its_run(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor
) -> None:
    """Redis has accepted the step, and what it said was lost: the answer comes over another connection."""
    proxy.cut_after = is_submit

    run = await run_of(behind_proxy, first_step(5, request_id="first"))

    (birth,) = await executor.commands.hmget(executor.keys.sequence(sequence_id("running_sum", "", 1)).record, "bn")
    assert f"{birth.decode()}.1" == run
    assert 1 == len(executor.received)


async def test_an_answer_that_waits_for_a_name_is_given_without_it_when_nothing_more_is_known(
    parts: GatewayParts,
) -> None:
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    call = first_step(5)
    record, _ = parts.catalog.find("running_sum", "")
    admitted = admit(call, record, "1", arrived_ns=0, make_session=lambda: 1)
    pending = PendingRequest(call, record, admitted, future, shard=ShardId(0), token="1")

    assert pending.answered(encode(ReplyMessage("1", step=1)), "key")
    assert pending.answered(encode(ReplyMessage("1", step=7, number=1, more=True)), "key"), "a retry's answers"
    assert not future.done()
    pending.failed(UnavailableError("Redis is away"))

    assert {"sequence_step": 1} == (await future).parameters
    pending.was_accepted(Accepted("1-0", 1, "1-0.1"))
    assert not pending.answered(encode(ReplyMessage("1", step=1)), "key")


async def test_a_model_without_state_has_no_run_to_tell(parts: GatewayParts) -> None:
    call = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), bytes(4)),), run_info=True)

    for _ in range(2):
        assert {} == (await parts.inference.submit(call)).parameters


async def test_an_end_whose_outcome_is_lost_is_sent_again_by_its_gateway(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor
) -> None:
    run = await run_of(behind_proxy, first_step(5))
    proxy.cut_after = is_submit

    await behind_proxy.inference.submit(close(run))

    record = executor.keys.sequence(sequence_id("running_sum", "", 1)).record
    assert [b"1"] == await executor.commands.hmget(record, "cl")


@pytest.mark.settings(max_requests_in_flight=1, request_timeout_ms=50)
async def test_an_end_that_waits_for_redis_is_in_flight_and_has_its_time_as_any_request(
    behind_proxy: GatewayParts, proxy: Proxy, executor: FakeExecutor
) -> None:
    parts = behind_proxy
    proxy.refuses = True
    proxy.cut_all()
    waiting = parts.inference.submit(close("1-0.1"))

    assert 1 == parts.inference.in_flight
    with pytest.raises(UnavailableError, match="1 requests in flight, which is its limit"):
        await parts.inference.submit(close("1-0.1"))
    with pytest.raises(UnavailableError, match="50 ms were over before the request was sent: send it again"):
        await waiting
    last = parts.inference.submit(close("1-0.1"))
    parts.inference.give_up("the gateway has stopped")
    with pytest.raises(UnavailableError, match="the gateway has stopped before the request was sent: send it again"):
        await last
    proxy.refuses = False


async def test_both_protocols_tell_runs_and_end_them(gateway: RunningGateway) -> None:
    first = infer_document(5, sequence_id=1, sequence_start=True, sequence_step=1, sequence_run_info=True)
    told = await posted(gateway.url, PATH, first)
    assert 5 == answer(told)
    run = told.document["parameters"]["sequence_run"]
    ended = await posted(gateway.url, PATH, {"parameters": {"sequence_id": 1, "sequence_close": run}, "inputs": []})
    assert (200, []) == (ended.status, ended.document["outputs"])
    refused = await posted(gateway.url, PATH, infer_document(1, sequence_id=1, sequence_step=2))
    assert "cancelled" == refused.document["reason"]

    async with grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as client:
        asked = {"sequence_step": 1, "sequence_run_info": True}
        number = [tensor(grpc_aio.InferInput, 5)]
        said: Any = await client.infer("running_sum", number, sequence_id=2, sequence_start=True, parameters=asked)
        run = said.get_response().parameters["sequence_run"].string_param
        await client.infer("running_sum", [], sequence_id=2, parameters={"sequence_close": run})
        with pytest.raises(InferenceServerException, match=r"cancelled|ended it"):
            await client.infer("running_sum", number, sequence_id=2, parameters={"sequence_step": 2})
        for wrong in ("", 7, True):
            with pytest.raises(InferenceServerException, match="'sequence_close'"):
                await client.infer("running_sum", [], sequence_id=2, parameters={"sequence_close": wrong})
    for wrong in ("", 7, None):
        document: dict[str, Any] = {"parameters": {"sequence_id": 1, "sequence_close": wrong}, "inputs": []}
        refused = await posted(gateway.url, PATH, document)
        assert "'sequence_close'" in refused.error
