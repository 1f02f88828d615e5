"""What becomes of a request's answers: each is handed on once, in order, and an error says what its caller can do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from gateway.requests.exchange.slot_waits import SlotWaits
from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer, PendingRequest
from shared.contract.errors import (
    Code,
    MeshError,
    ModelError,
    Reason,
    RequestError,
    SequenceError,
    UnavailableError,
)
from shared.contract.forecast import Forecast, LineForecast, Outlook
from shared.contract.ids import SequenceId
from shared.contract.messages import WAITED_MS, ReplyMessage, StepFlag, encode
from shared.contract.tensors import Tensor
from tests.gateway.fake_executor import running_sum
from tests.gateway.requests import portless
from tests.gateway.requests.portless import SEQUENCE


def pending(*, sequence: SequenceId | None = SEQUENCE, flags: StepFlag = StepFlag.NONE, **call: Any) -> PendingRequest:
    """A request to a decoupled model."""
    config = msgspec.structs.replace(running_sum("model"), decoupled=True)
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    return portless.pending(config, InferCall("model", **call), sequence=sequence, flags=flags, future=future)


def reply(number: int, *, more: bool = True, **fields: Any) -> bytes:
    output = Tensor("OUTPUT", "INT32", (1,), number.to_bytes(4, "little"))
    return encode(ReplyMessage("1", (output,), step=3, number=number, more=more, **fields))


class TestManyAnswers:
    async def test_each_is_handed_on_once_though_a_model_runs_again_and_the_last_one_ends_the_request(self) -> None:
        request, taken = pending(), list[Answer | MeshError]()
        request.take = taken.append

        assert [True] * 5 == [request.answered(reply(number), "key") for number in (1, 2, 1, 2, 3)]
        assert [1, 2, 3] == [one.message.number for one in taken if isinstance(one, Answer)]
        assert not request.future.done()
        assert not request.answered(reply(4, more=False), "key")

        assert 4 == (await request.future).output_bytes
        assert not request.answered(reply(4, more=False), "key"), "the request is over"
        assert 3 == len(taken)

    async def test_a_model_that_has_less_to_say_when_it_runs_again_says_nothing_twice(self) -> None:
        request, taken = pending(), list[Answer | MeshError]()
        request.take = taken.append
        for number in (1, 2):
            request.answered(reply(number), "key")

        assert not request.answered(reply(2, more=False), "key")

        assert (True, ()) == ((last := await request.future).message.empty, last.message.outputs)

    async def test_an_error_on_the_way_is_handed_on_and_one_at_the_end_ends_the_request(self) -> None:
        request, taken = pending(), list[Answer | MeshError]()
        request.take = taken.append
        request.answered(reply(1, error_code=Code.INTERNAL, error="no"), "key")
        request.answered(reply(1, more=False, error_code=Code.INTERNAL, error="over"), "key")

        (error,) = taken
        assert isinstance(error, ModelError)
        with pytest.raises(ModelError, match="over"):
            await request.future

    async def test_a_caller_that_names_the_first_answer_that_it_lacks_gets_no_earlier_one(self) -> None:
        request, taken = pending(first_answer=3), list[Answer | MeshError]()
        request.take = taken.append
        for number in (1, 2, 3):
            request.answered(reply(number), "key")

        assert [3] == [one.message.number for one in taken if isinstance(one, Answer)]

    @pytest.mark.parametrize("more", [True, False])
    async def test_a_gap_is_told_with_the_number_from_which_a_step_can_be_had(self, *, more: bool) -> None:
        request = pending()
        request.take = [].append
        request.answered(reply(1), "key")

        assert not request.answered(reply(4, more=more), "key")

        with pytest.raises(SequenceError, match="from 2 to 3 that are kept no longer") as told:
            await request.future
        assert "with 'sequence_answer' 4 it can be sent again" in str(told.value)
        assert (Reason.ANSWERED, 3, True) == (told.value.reason, told.value.last_step, told.value.accepted)

    async def test_a_stateless_request_with_a_gap_is_sent_again(self) -> None:
        request = pending(sequence=None)
        request.take = [].append

        assert not request.answered(reply(2), "key")

        with pytest.raises(UnavailableError, match="model 'model' were lost: send it again") as told:
            await request.future
        assert told.value.accepted


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.UNAVAILABLE, "", UnavailableError),
        (Code.INTERNAL, "", ModelError),
        (Code.UNKNOWN, "", ModelError),
        (Code.INVALID_ARG, "", RequestError),
        (Code.INVALID_ARG, Reason.ENDED, SequenceError),
        ("of a newer release", "", ModelError),
    ],
)
async def test_the_class_of_an_executors_error_says_what_its_caller_can_do(
    code: str, reason: str, kind: type[MeshError]
) -> None:
    request = pending()
    request.answered(encode(ReplyMessage("1", error_code=code, error="no", reason=reason)), "key")

    with pytest.raises(kind, match="no") as told:
        await request.future
    assert told.value.accepted


@pytest.mark.parametrize(("sequence", "named"), [(SEQUENCE, "a step of sequence 5 of"), (None, "a request to")])
async def test_an_answer_that_cannot_be_read_is_no_reason_to_send_a_step_again(
    sequence: SequenceId | None, named: str
) -> None:
    request = pending(sequence=sequence)

    assert not request.answered(b"\xff", "key")

    with pytest.raises(MeshError, match=f"^{named} model 'model' was answered, but") as told:
        await request.future
    assert (Code.INTERNAL, True) == (told.value.code, told.value.accepted)


async def test_the_version_that_ran_is_told_or_else_the_one_that_was_asked_for() -> None:
    ran, asked = pending(), pending()
    ran.answered(encode(ReplyMessage("2")), "key")
    asked.answered(encode(ReplyMessage("")), "key")

    assert ("2", "1") == ((await ran.future).version, (await asked.future).version)


# -- waits for slots -------------------------------------------------------------------------------------------------


def waiting(**call: Any) -> tuple[PendingRequest, list[dict[str, Any]]]:
    """A request that has asked about its wait, and what it hears of it."""
    request, heard = pending(flags=StepFlag.TOLD, **call), list[dict[str, Any]]()
    request.take = [].append
    request.hear = lambda answer: heard.append(dict(answer.parameters))
    return request, heard


def notice(waited_ms: int) -> bytes:
    return encode(ReplyMessage("", parameters={WAITED_MS: waited_ms}, notice=True))


async def test_a_request_hears_of_its_place_when_that_changes_and_its_answer_tells_all_its_waits() -> None:
    request, heard = waiting()
    for outlook in (Outlook(3), Outlook(3), Outlook(3, 900, 100, 2000), Outlook(3, 800, 100, 2000), Outlook(2, 700)):
        request.foretold(outlook)
    assert request.waits
    assert [3, 3, 2] == [one["sequence_place"] for one in heard]
    assert [None, 900, 700] == [one.get("sequence_wait_ms") for one in heard]

    # After a takeover it waits once more.
    assert [True, True] == [request.answered(notice(ms), "key") for ms in (40, 2)]

    assert not request.waits
    assert [40, 42] == [one[WAITED_MS] for one in heard[3:]]
    request.answered(encode(ReplyMessage("1")), "key")
    assert {WAITED_MS: 42} == (await request.future).parameters


async def test_an_error_before_the_slot_tells_what_was_known_and_one_behind_it_does_not() -> None:
    before, _ = waiting()
    before.foretold(Outlook(7, 900))
    behind, _ = waiting()
    behind.foretold(Outlook(7, 900))
    behind.answered(notice(1), "key")

    for request in (before, behind):
        request.answered(encode(ReplyMessage("1", error_code=Code.CANCELLED, error="gone")), "key")

    assert {"place": 7, "wait_ms": 900} == facts(before)
    assert {} == facts(behind)


def facts(request: PendingRequest) -> dict[str, str | int]:
    error = request.future.exception()
    assert isinstance(error, MeshError)
    return error.facts


LONG_LINE = (*(f"q{number}" for number in range(99)), SEQUENCE)


class Foreseen:
    """Says what is to be expected, or that Redis is away."""

    def __init__(self, *, away: bool = False) -> None:
        self.away = away

    async def of(self, sequence: SequenceId) -> Forecast | None:
        if self.away:
            raise ConnectionError
        return Forecast([LineForecast("1", LONG_LINE, observed_ms=100_000, freed=50)])


async def looked(waits: SlotWaits) -> None:
    """One look at the forecasts."""
    task = asyncio.create_task(waits.run())
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize(("max_ms", "is_new", "refused"), [(1000, True, True), (1000, False, False), (0, True, False)])
async def test_a_first_step_is_taken_back_that_would_wait_longer_than_its_caller_will(
    max_ms: int, *, is_new: bool, refused: bool
) -> None:
    withdrawn = list[PendingRequest]()
    waits = SlotWaits(cast(Any, Foreseen()), withdrawn.append)
    request, _ = waiting(wait_max_ms=max_ms)
    assert request.wait is not None
    request.wait.is_new = is_new
    waits.begin(request)

    for _ in range(2):
        await looked(waits)

    assert [request] * refused == withdrawn, "once, however often it is looked at"
    request.answered(encode(ReplyMessage("1", error_code=Code.CANCELLED, error="withdrawn")), "key")
    error = request.future.exception()
    assert isinstance(error, SequenceError if refused else RequestError)
    assert 100 == facts(request)["place"]
    if refused:
        assert "would wait for a slot for about" in str(error)


@pytest.mark.parametrize("away", [True, False])
async def test_who_finds_the_line_full_is_told_what_to_expect_if_that_is_known(*, away: bool) -> None:
    waits = SlotWaits(cast(Any, Foreseen(away=away)), list[PendingRequest]().append)
    request, _ = waiting()
    waits.refuse(request, UnavailableError("Exceeds maximum queue size"))

    await looked(waits)

    assert (None if away else 101) == facts(request).get("place")
