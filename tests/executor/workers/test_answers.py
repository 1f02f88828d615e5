"""Replies as the executor builds them."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from executor.engine.base import RowError, RowResult
from executor.workers import answers
from executor.workers.answers import answer
from shared.contract.errors import Code, Reason
from shared.contract.ids import ExecutorId
from shared.contract.messages import ReplyMessage, decode_reply, encode
from shared.contract.tensors import Tensor, from_numpy


class Text(str):
    """A text that no message takes, as numpy's are."""

    __slots__ = ()


@pytest.mark.parametrize(
    "result",
    [
        RowError(Text("INTERNAL"), "m", number=2),
        RowError(Code.NOT_FOUND, cast("str", {}), number=2),
        RowError("INTERNAL", cast("str", 5), lost=True, number=2),
        RowResult((), parameters={"a": Text("x")}, number=2),
        RowResult(cast("tuple[Tensor]", (5,)), number=2),
    ],
)
def test_what_a_backend_gives_and_no_message_takes_is_an_error_of_that_row(result: RowResult | RowError) -> None:
    told = decode_reply(answer(result, version="1", executor=ExecutorId("a"), step=3, more=True))

    is_lost = isinstance(result, RowError) and result.lost
    assert (Code.INTERNAL, 2 if is_lost else 3, 2, True) == (told.error_code, told.step, told.number, told.more)
    assert told.error.startswith("the model's answer cannot be sent: ")
    assert (Reason.LOST if is_lost else "") == told.reason


def test_the_same_answers_end_in_bytes_that_differ() -> None:
    """As messages of the same request (`tests/gateway/requests/test_admission.py`)."""
    ends = {answer(RowResult((), {}), version="1", executor=ExecutorId("a"))[-1] for _ in range(128)}

    assert set(range(128)) == ends


def test_an_answer_that_redis_does_not_take_is_told_as_such() -> None:
    result = RowResult((from_numpy("OUTPUT", np.zeros((1, 100), np.uint8)),), {})
    whole = answer(result, version="1", executor=ExecutorId("a"), step=3)

    told = decode_reply(answer(result, version="1", executor=ExecutorId("a"), step=3, bytes_max=len(whole) - 1))

    assert ("", 1) == (decode_reply(whole).error, len(decode_reply(whole).outputs))
    assert (Code.INTERNAL, 3, ()) == (told.error_code, told.step, tuple(told.outputs))
    assert f"answer has {len(whole)} bytes" in told.error


def test_an_answer_of_which_the_tensors_alone_are_too_large_is_not_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = RowResult((from_numpy("OUTPUT", np.zeros((1, 100), np.uint8)),), {})
    encoded: list[ReplyMessage] = []

    def noting(message: ReplyMessage) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(answers, "encode", noting)

    told = decode_reply(answer(result, version="1", executor=ExecutorId("a"), step=3, bytes_max=99))

    assert "answer has 100 bytes" in told.error
    assert [()] == [message.outputs for message in encoded]
