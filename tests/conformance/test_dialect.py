"""The dialect (docs/triton/dialect.md): what Triton's own parser refuses."""

from __future__ import annotations

import aiohttp
import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Caller, Gate, Step, Stream, fresh_id, refused
from tests.conformance.targets import Target
from tests.conformance.test_dynamic_batching import held, in_order_of_running, waiting

pytestmark = pytest.mark.mesh_only("Triton does not parse the dialect")
EXPIRED = "timeout of the corresponding sequence has been expired"
SHORT_US = 1


async def test_timeout_in_the_backlog_refuses_a_sequence_or_serves_it_late(lone_caller: Caller) -> None:
    """TIMEOUT_REJECT: it fails with its sequence, as in Triton. TIMEOUT_COMPLETE: it is served when a slot is free.

    Both models have one slot (`reusable_batch { max_size: 1 }`), which a sequence holds that began without START.
    """
    complete, reject = lone_caller.of("dialect_complete"), lone_caller.of("dialect_reject")
    holder, waiter = fresh_id(), fresh_id()
    assert [5, 5] == [(await caller(holder, 5)).total for caller in (complete, reject)]

    late = complete.begin(Step(waiter, 7, end=True, timeout_us=SHORT_US))
    with refused(Code.UNAVAILABLE, EXPIRED):
        await reject.infer(Step(waiter, 7, end=True, timeout_us=SHORT_US))

    assert [11, 11] == [(await caller(holder, 6, end=True)).total for caller in (complete, reject)]
    assert 7 == (await late).total
    # The slot that the refused sequence did not get serves the next one.
    assert 3 == (await reject(fresh_id(), 3, end=True)).total


async def test_a_requests_own_timeout_is_decided_by_the_timeout_action(
    target: Target, caller: Caller, gate: Gate
) -> None:
    """No policy of these models has a timeout, so Triton would ignore the requests' own."""
    async with Stream(target, "dialect_hasty") as stream:
        await held(stream, gate)
        with refused(Code.UNAVAILABLE, "Request timeout expired"):
            await caller.of("dialect_hasty").infer(Step(value=1, timeout_us=1000))
        stream.send(Step(value=2))
        gate.open()
        assert [0, 2] == [answer.total for answer in await stream.answers(2)]


async def test_a_late_request_runs_after_the_punctual_ones(target: Target, gate: Gate) -> None:
    async with Stream(target, "dialect_patient") as stream:
        await held(stream, gate)
        stream.send(Step(value=2, timeout_us=1), Step(value=1))
        await waiting(target, "dialect_patient", 2)
        gate.open()
        answers = (await stream.answers(3))[1:]

    assert [1, 2] == in_order_of_running(answers)


@pytest.mark.parametrize("model", ["corrid_uint64", "corrid_int64", "corrid_string", "oldest"])
async def test_a_session_of_any_name_starts_by_itself_with_any_sequence_model(target: Target, model: str) -> None:
    """None of these models is in the dialect, and no request has START."""
    session = f"visitor {fresh_id()}"
    body = {"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [3]}]}
    path = f"http://{target.http}/v2/models/{model}/infer"
    totals: list[int] = []
    async with aiohttp.ClientSession(headers={"Inference-Session-Id": session}) as http:
        for parameters in ({}, {}, {"sequence_end": True}):
            async with http.post(path, json=body | {"parameters": parameters}) as response:
                document = await response.json()
                assert (200, session) == (response.status, response.headers["Inference-Session-Id"]), document
            totals += next(each["data"] for each in document["outputs"] if each["name"] == "OUTPUT")

    assert [3, 6, 9] == totals
