"""The answers of one request that wait for its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.bounds.unread_answers import ENTRY_BYTES, UNLIMITED, UnreadAnswers
from gateway.requests import answers
from gateway.requests.answers import TOO_SLOW, answers_of
from gateway.requests.inference import Inference
from gateway.requests.waiting import Answer, OnOpen, OpenRequest
from shared.contract.errors import MeshError
from shared.contract.messages import ReplyMessage
from tests.gateway.cycles import nothing_stays


class Request(OpenRequest):
    def __init__(self) -> None:
        self.is_many = True
        self.future = asyncio.get_running_loop().create_future()

    def failed(self, error: MeshError) -> None:
        self.future.set_exception(error)


@dataclass
class InferenceTwin:
    unread: UnreadAnswers

    def submit(self, _call: Any, *, on_open: OnOpen, client: str) -> asyncio.Future[Answer]:
        self.request = Request()
        on_open(self.request)
        return self.request.future


class Kept(Answer, frozen=True, weakref=True):
    """An answer whose end is seen."""


def answer() -> Answer:
    nobody: Any = None
    return Kept(ReplyMessage("token"), nobody, "1", "", None)


@pytest.mark.parametrize("bound", ["of one request", "of all"])
async def test_answers_that_are_not_taken_go_when_their_request_fails(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Their client may never read, and so never come to the error: nothing else would let go of them."""
    unread = UnreadAnswers(20 * ENTRY_BYTES)
    if bound == "of one request":
        monkeypatch.setattr(answers, "UNTAKEN_BYTES_MAX", 10 * ENTRY_BYTES)
    async with nothing_stays(Kept):
        given = answers_of(cast("Inference", twin := InferenceTwin(unread)), cast("Any", None), "")
        take = twin.request.take
        assert take is not None
        while not twin.request.future.done():
            take(answer())

    assert unread.taken == 0
    assert [TOO_SLOW] == [error.message async for error in given if isinstance(error, MeshError)]


@pytest.mark.parametrize("bound", ["of one request", "of all"])
async def test_one_answer_is_never_too_many(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    unread = UnreadAnswers(ENTRY_BYTES // 2 if bound == "of all" else UNLIMITED)
    monkeypatch.setattr(answers, "UNTAKEN_BYTES_MAX", ENTRY_BYTES // 2)
    given = answers_of(cast("Inference", twin := InferenceTwin(unread)), cast("Any", None), "")
    take = twin.request.take
    assert take is not None
    for large in (answer(), answer()):
        take(large)
        assert large is await anext(given)

    await given.aclose()


async def test_a_request_that_its_client_leaves_stays_in_no_cycle() -> None:
    """Its inputs may be large."""
    async with nothing_stays(Request, Kept):
        given = answers_of(cast("Inference", twin := InferenceTwin(UnreadAnswers(1 << 40))), cast("Any", None), "")
        take = twin.request.take
        assert take is not None
        for _ in range(3):
            take(answer())
        await anext(given)
        await given.aclose()
        assert twin.request.future.cancelled()
        del given, take, twin
