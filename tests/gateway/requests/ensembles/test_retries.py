"""Steps of an ensemble's later states that are sent again, as Redis meets them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.parts import GatewayParts
from gateway.requests.caller import Caller
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Accepted, Answer, PendingRequest
from shared.contract.errors import Reason, SequenceError
from shared.contract.messages import ModelRecord, ReplyMessage
from shared.contract.model_config import EnsembleStep, TensorSpec
from tests.gateway.fake_executor import FakeExecutor, running_sum
from tests.gateway.requests.ensembles.test_progress import MODELS
from tests.gateway.requests.ensembles.test_requests import asked, ensembles_of
from tests.gateway.requests.portless import step, total

SUM = ModelRecord(running_sum(), "{}", ("1",))
TWO_SUMS = msgspec.structs.replace(
    SUM.config,
    name="two_sums",
    sequence_batching=None,
    inputs=(TensorSpec("I", "INT32", (1,)),),
    outputs=(TensorSpec("O", "INT32", (1,)),),
    ensemble=tuple(
        EnsembleStep("running_sum", "", {"INPUT": given}, {"OUTPUT": made}) for given, made in (("I", "a"), ("a", "O"))
    ),
)


def of_two_sums(number: int, *, end: bool = False) -> InferCall:
    """A client's step, which carries its number."""
    (given,) = step(number).inputs
    inputs = (msgspec.structs.replace(given, name="I"),)
    start = number == 1
    return InferCall("two_sums", correlation_id=1, start=start, end=end, expected_step=number, inputs=inputs)


async def of_second_state(number: int, *, end: bool = False) -> InferCall:
    """What a gateway sends to the second state, when the first one has taken the step and answers with its number."""
    sent: list[InferCall] = []

    def send(call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        sent.append(call)
        (summed,) = step(number).inputs
        message = ReplyMessage(version, (msgspec.structs.replace(summed, name="OUTPUT"),))
        caller.future.set_result(Answer(message, record, version, "", None))
        accepted = Accepted("7-0", number, "7-0.1")
        return cast(Any, SimpleNamespace(call=call, future=caller.future, accepted=accepted))

    await asked(ensembles_of(send), ModelRecord(TWO_SUMS, "{}", ("1",)), of_two_sums(number, end=end))
    return sent[1]


async def test_a_first_step_that_is_sent_again_behind_the_last_one_runs_once(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway, to which the client has sent it again, was slower than all steps behind it."""
    monkeypatch.setitem(MODELS, "running_sum", SUM)
    first, last = await of_second_state(1), await of_second_state(2, end=True)
    assert 1 == total(await parts.inference.submit(first))
    await executor.pause()
    ended = parts.inference.submit(last)
    again = parts.inference.submit(first)
    async with asyncio.timeout(30):
        assert 1 == total(await again)
    executor.paused.clear()

    assert 3 == total(await ended)
    assert 2 == len(executor.received)


async def test_an_only_step_that_is_sent_again_runs_once(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "running_sum", SUM)
    only = await of_second_state(1, end=True)

    assert [1, 1] == [total(await parts.inference.submit(only)) for _ in range(2)]
    assert 1 == len(executor.received)


async def test_a_sequence_goes_on_though_a_caller_of_its_first_state_had_to_give_way(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asked for a step again and again lost all states of its sequence."""
    monkeypatch.setattr("shared.store.scripts.JOINED_MAX", 1)
    executor.models = (SUM.config, TWO_SUMS)
    executor.__post_init__()
    await executor.join()
    async with asyncio.timeout(30):
        while not all("two_sums" in known for known in parts.catalog.offer):
            await asyncio.sleep(0.01)
    await executor.pause()
    first, oldest, newest = [parts.inference.submit(of_two_sums(1)) for _ in range(3)]
    with pytest.raises(SequenceError) as told:
        await asyncio.wait_for(oldest, 30)
    executor.paused.clear()

    assert (Reason.BUSY, "same") == (told.value.reason, told.value.facts["retry"])
    async with asyncio.timeout(30):
        assert [1, 1] == [total(await first), total(await newest)]
        # 1, then 1 + 2: their sum.
        assert 4 == total(await parts.inference.submit(of_two_sums(2, end=True)))
