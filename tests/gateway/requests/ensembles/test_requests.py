"""Requests to ensembles: what a gateway holds for one, and how long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.requests.caller import Caller
from gateway.requests.ensembles.requests import Ensembles
from gateway.requests.ensembles.runs import SendsRequests
from gateway.requests.infer_call import InferCall
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer, PendingRequest
from shared.contract.errors import MeshError, ModelError
from shared.contract.messages import ModelRecord, ReplyMessage
from shared.contract.tensors import Tensor
from shared.traces.tracing import Tracing
from tests.gateway.requests.ensembles.test_progress import MODELS, model, step

pytestmark = pytest.mark.unit


class Raw(bytes):
    """A tensor's bytes, which say when they go."""

    gone: list[bytes]

    def __del__(self) -> None:
        self.gone.append(bytes(self))


def found(name: str, _: str) -> tuple[ModelRecord, str]:
    return MODELS[name], "1"


def not_counted(*_: object) -> None:
    return


def ensembles_of(send: SendsRequests, tracing: Tracing | None = None) -> Ensembles:
    """Ensembles whose steps go to `send`."""
    catalog = SimpleNamespace(offer=object(), find=found)
    notices = SimpleNamespace(count=not_counted)
    replies = SimpleNamespace(has_given_up=False)
    return Ensembles(
        cast(Any, catalog),
        cast(Any, None),
        cast(Any, replies),
        tracing or Tracing(),
        cast(Any, notices),
        send=send,
        hold=lambda _: None,
        unread=UnreadAnswers(UNLIMITED),
    )


class Chain:
    """A request to an ensemble of three steps, one behind the other, which the test answers. `gone`: tensors that
    nobody holds any more
    """

    def __init__(self) -> None:
        Raw.gone = self.gone = []
        self.open: list[asyncio.Future[Answer]] = []
        steps = (step("plain", "I", "a"), step("plain", "a", "b"), step("plain", "b", "O"))
        ensembles = ensembles_of(self.send)
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        call = InferCall("e", "", inputs=(self.tensor("I", b"given"),))
        ensembles.begin(
            call, Caller(self.answer, None, None), model("e", steps=steps), "1", ConnectionSequences(lambda _: None)
        )

    def tensor(self, name: str, raw: bytes) -> Tensor:
        return Tensor(name, "INT8", (1, 1), Raw(raw[:1]))

    def send(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        self.open.append(caller.future)
        return cast(Any, SimpleNamespace(call=call, future=caller.future))

    async def answered(self, raw: bytes) -> None:
        message = ReplyMessage("1", (self.tensor("O", raw),))
        self.open.pop().set_result(Answer(message, MODELS["plain"], "1", "", None))
        del message
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """What goes, goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_tensor_goes_when_no_step_needs_it_any_more() -> None:
    chain = Chain()
    await chain.answered(b"a")
    assert [] == chain.gone, "the second step has the first one's tensor"
    await chain.answered(b"b")
    assert b"a" in chain.gone


async def test_everything_goes_with_the_request() -> None:
    chain = Chain()
    for raw in (b"a", b"b", b"O"):
        await chain.answered(raw)
    assert b"O" == chain.answer.result().message.outputs[0].raw
    del chain.answer

    assert {b"g", b"a", b"b", b"O"} == {*chain.gone}


async def test_everything_goes_with_a_request_that_fails() -> None:
    chain = Chain()
    await chain.answered(b"a")
    chain.open.pop().set_exception(ModelError("no"))
    await asyncio.sleep(0)
    assert isinstance(chain.answer.exception(), ModelError)
    del chain.answer

    assert {b"g", b"a"} == {*chain.gone}


async def test_a_defect_while_a_step_is_sent_is_its_requests_error_and_holds_nobody_up() -> None:
    def broken(call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        raise ZeroDivisionError

    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    call = InferCall("e", "", correlation_id=1, start=True, inputs=(Tensor("I", "INT8", (1, 1), b"1"),))
    ensembles = ensembles_of(broken)
    record = model("e", steps=(step("state", "I", "O"),))
    ensembles.begin(call, Caller(answer, None, None), record, "1", ConnectionSequences(lambda _: None))
    with pytest.raises(MeshError, match="internal error in the gateway: ZeroDivisionError"):
        await answer

    assert 0 == len(ensembles.lines)
