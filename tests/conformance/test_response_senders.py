"""Response senders of models that are not decoupled: one response, from `execute` or later. Source: triton-spec 8;
Triton's suite L0_backend_python, response_sender.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from tests.conformance.calls import Caller, Refused
from tests.conformance.targets import Target
from tests.conformance.test_decoupled import streamed
from tests.mesh.running_mesh import PATIENCE_S

MODEL = "answering"
RETURNS = {"returns": True}


async def value(caller: Caller, number: int, **said: Any) -> int | str:
    """What a request comes to: its output, or the text of its error."""
    tensor = caller.library.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[number]], np.int32))
    try:
        async with asyncio.timeout(PATIENCE_S):
            result = await caller.client.infer(MODEL, [tensor], parameters=said)
    except InferenceServerException as error:
        return Refused.of(error).message
    return int(result.as_numpy("OUTPUT").item())


async def both(caller: Caller, number: int, **said: Any) -> int | str:
    """As `value`, of a request that waits for what the next one sets free."""
    waiting = asyncio.create_task(value(caller, number, **said))
    while not waiting.done():
        assert 1 == await value(caller, 1, **RETURNS)
    return waiting.result()


@pytest.mark.parametrize("now", ["final", "answer,flag"])
async def test_a_response_is_sent_while_execute_runs(caller: Caller, now: str) -> None:
    assert 1007 == await value(caller, 7, now=now)


@pytest.mark.parametrize("later", ["final", "answer,flag"])
async def test_a_response_is_sent_later_while_the_next_requests_run(caller: Caller, later: str) -> None:
    assert 2007 == await both(caller, 7, later=later)


async def test_requests_of_one_batch_are_answered_each_in_its_way(caller: Caller) -> None:
    ways = ({"returns": True}, {"now": "final"}, {"later": "final"}, {"now": "error"})

    made = [asyncio.create_task(value(caller, number, **way)) for number, way in enumerate(ways)]
    while not all(one.done() for one in made):
        assert 1 == await value(caller, 1, **RETURNS)

    assert [0, 1001, 2002, "it failed"] == [one.result() for one in made]


async def test_the_final_flag_alone_is_refused(caller: Caller) -> None:
    refused = await value(caller, 7, now="flag")

    assert isinstance(refused, str)
    assert "Non-decoupled model cannot send complete final before sending a response." in refused


async def test_a_response_that_is_sent_later_than_one_was_returned_is_dropped(caller: Caller) -> None:
    assert 7 == await value(caller, 7, returns=True, later="final")
    assert 1 == await value(caller, 1, **RETURNS)


async def test_over_a_stream_the_answer_carries_the_final_flag(target: Target) -> None:
    def asked(number: int, **said: Any) -> dict[str, Any]:
        tensor = grpc_aio.InferInput("INPUT", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[number]], np.int32))
        return {"model_name": MODEL, "inputs": [tensor], "parameters": said}

    async with grpc_aio.InferenceServerClient(target.grpc) as client:
        got = await streamed(client, [asked(1, now="final"), asked(2, returns=True)])

    assert [("", 1001), ("", 2)] == got
    assert [True, True] == got.finals


@pytest.mark.mesh_only(
    "Triton answers when the final flag comes, or never; a second response ends the server or the call"
)
@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ({"now": "answer"}, 1007),
        ({"now": "answer,answer"}, 1007),
        ({"now": "final,raise"}, 1007),
        ({"now": "final", "returns": True}, 1007),
        ({"later": "answer"}, 2007),
        ({"later": "answer,answer"}, 2007),
        ({"later": "flag"}, "let go of the request's response sender without a response"),
        ({"later": "drop"}, "let go of the request's response sender without a response"),
        ({}, "Expected an 'InferenceResponse' object in the execute function return list"),
    ],
)
async def test_the_first_response_is_the_answer_and_a_request_without_one_ends_with_an_error(
    caller: Caller, said: dict[str, Any], answer: int | str
) -> None:
    got = await both(caller, 7, **said)

    assert answer == got if isinstance(answer, int) else isinstance(got, str) and answer in got
