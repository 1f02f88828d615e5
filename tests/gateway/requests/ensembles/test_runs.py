"""The runs behind a decoupled step: how many go on at once, what waits, what is left when nobody wants the answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.bounds.unread_answers import ENTRY_BYTES, UNLIMITED, UnreadAnswers
from gateway.requests.caller import Caller
from gateway.requests.ensembles import runs
from gateway.requests.ensembles.in_order import RunAnswer
from gateway.requests.ensembles.progress import HeldTensor
from gateway.requests.ensembles.runs import EnsembleServices, RequestContext, StageRun, WaitingBytes
from gateway.requests.infer_call import InferCall
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer, OpenRequest, PendingRequest
from shared.contract.errors import MeshError, UnavailableError
from shared.contract.messages import ModelRecord, ReplyMessage
from tests.gateway.requests.ensembles.test_progress import MODELS, plan, step, tensor

pytestmark = pytest.mark.unit


class Sent(OpenRequest):
    """A request of a step, in place of the mesh."""

    def __init__(self, call: InferCall, future: asyncio.Future[Answer]) -> None:
        self.call = call
        self.future = future
        self.take = None

    def answer(self, value: int, *, number: int = 0, more: bool = False, empty: bool = False) -> None:
        message = ReplyMessage(
            "1", () if empty else (tensor("O", value),), number=number, more=more or empty, empty=empty
        )
        made = Answer(message, MODELS[self.call.model], "1", "", None)
        if more:
            assert self.take is not None
            self.take(made)
        else:
            self.future.set_result(made)


class Player:
    """One request to an ensemble of a decoupled step and one behind it, whose steps are answered by the test."""

    def __init__(self, *, runs_max: int = 0, unread_max: int = UNLIMITED) -> None:
        of = plan(step("many", "I", "x"), step("plain", "x", "O"))
        config = msgspec.structs.replace(of.record.config, ensemble_inflight_max=runs_max)
        of = msgspec.structs.replace(of, record=msgspec.structs.replace(of.record, config=config))
        self.sent: list[Sent] = []
        self.given: list[RunAnswer] = []
        self.failures: list[MeshError] = []
        self.held = 0
        self.unread = UnreadAnswers(unread_max)
        nothing = cast(Any, None)
        replies = cast(Any, SimpleNamespace(has_given_up=False))
        services = EnsembleServices(nothing, replies, nothing, self.send, self.hold)
        connection = ConnectionSequences(lambda _: None)
        call = InferCall("e", trace_headers={"traceparent": "odd"})
        waiting = WaitingBytes("e", self.unread, self.fail)
        context = RequestContext(services, call, connection, "", 0, None, "", None, waiting)
        self.run = StageRun(context, of.stages, {"I": HeldTensor(tensor("I"), 1)}, self.given.append)
        self.run.begin()

    def fail(self, error: MeshError) -> None:
        self.failures.append(error)
        self.run.unwanted()

    def hold(self, size: int, client: str) -> None:
        self.held += size

    def send(self, call: InferCall, caller: Caller, record: ModelRecord, version: str) -> PendingRequest:
        assert caller.connection is not None
        assert caller.on_open is not None
        assert (record.config.name, "1") == (call.model, version)
        self.sent.append(Sent(call, caller.future))
        caller.on_open(self.sent[-1])
        return cast(PendingRequest, self.sent[-1])

    @property
    def behind(self) -> list[Sent]:
        return self.sent[1:]

    @property
    def answers(self) -> list[int | None]:
        """The numbers that were given on; None: only that no other follows."""
        return [one.outcome[0].raw[0] if isinstance(one.outcome, tuple) else None for one in self.given]


async def turns() -> None:
    """Lets what is due happen."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_so_many_answers_as_configured_are_on_their_way_and_leave_in_order() -> None:
    player = Player(runs_max=2)
    source = player.sent[0]
    for number in range(1, 5):
        source.answer(number, number=number, more=True)
    first, second = player.behind
    second.answer(12)
    await turns()
    assert 2 == len(player.behind)
    assert [] == player.answers
    first.answer(11)
    await turns()
    assert [11, 12] == player.answers
    third, fourth = player.behind[2:]
    source.answer(0, number=5, empty=True)
    fourth.answer(14)
    third.answer(13)
    await turns()

    assert [11, 12, 13, 14] == player.answers
    assert [False, False, False, True] == [one.is_last for one in player.given]
    assert 0 == player.held
    assert {} == player.run._runs, "a run that is over is forgotten: there may be any number of them"


async def test_answers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WAITING_BYTES_MAX", 3 * (ENTRY_BYTES + 1))
    player = Player(runs_max=1)
    source = player.sent[0]
    for number in range(1, 6):
        source.answer(number, number=number, more=True)
    (error,) = player.failures
    source.answer(6, number=6, more=True)
    await turns()

    assert isinstance(error, UnavailableError)
    assert str(error).startswith("in ensemble 'e', answers of a decoupled model come faster than the steps")
    assert all(one.future.cancelled() for one in player.sent)
    assert 2 == len(player.sent)
    assert player.given[-1].is_last
    assert 0 == player.held == player.unread.taken


async def test_they_count_with_the_answers_that_clients_have_not_read() -> None:
    player = Player(runs_max=2, unread_max=3 * ENTRY_BYTES)
    source = player.sent[0]
    for number in range(1, 5):
        source.answer(number, number=number, more=True)
    assert 2 * (ENTRY_BYTES + 1) == player.unread.taken
    assert [] == player.failures
    _, second = player.behind
    second.answer(12)
    await turns()
    (error,) = player.failures
    await turns()

    assert isinstance(error, UnavailableError)
    assert 0 == player.held == player.unread.taken


async def test_a_request_whose_answers_are_given_up_for_another_client_sends_nothing_more() -> None:
    player = Player(runs_max=1, unread_max=8 * ENTRY_BYTES + 7)
    source = player.sent[0]
    for number in range(1, 9):
        source.answer(number, number=number, more=True)
    player.unread.add("another", ENTRY_BYTES, lambda: None)
    assert [] == player.failures
    source.answer(9, number=9, more=True)
    await turns()

    assert 1 == len(player.failures)
    assert 2 == len(player.sent)
    assert all(one.future.cancelled() for one in player.sent)
    assert (0, ENTRY_BYTES) == (player.held, player.unread.taken)


async def test_when_the_client_leaves_everything_is_taken_back() -> None:
    player = Player(runs_max=2)
    for number in range(1, 5):
        player.sent[0].answer(number, number=number, more=True)
    player.run.left()
    await turns()

    assert all(one.future.cancelled() for one in player.sent)
    assert 3 == len(player.sent)
    assert 1 == sum(one.is_last for one in player.given)
    assert 0 == player.held


async def test_steps_are_of_the_whole_requests_span_and_not_of_their_clients() -> None:
    call = Player().sent[0].call

    assert ("", {}) == (call.within, call.trace_headers)


async def test_an_error_before_the_last_answer_is_the_outcome() -> None:
    player = Player()
    take = player.sent[0].take
    assert take is not None

    take(UnavailableError("odd"))
    await turns()

    assert ["in ensemble 'e', odd"] == [str(one.outcome) for one in player.given]
