"""What another release, or a fault, may write, and no client could read."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contract.messages import WAITED_MS, ReplyMessage, encode, read_reply
from shared.contract.tensors import Tensor

OUTPUT = Tensor("OUTPUT", "INT32", (1,), bytes(4))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step": (1 << 63) - 1, "reason": "a_word_of_tomorrow_7"},
        {"notice": True, "parameters": {WAITED_MS: 0}},
        {"number": 1, "more": True},
        {"number": 2},
    ],
)
def test_a_reply_is_read_as_it_was_written(fields: dict[str, Any]) -> None:
    reply = ReplyMessage("1", (OUTPUT,), **fields)

    assert reply == read_reply(encode(reply))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"reason": "Two words"}, "no reason"),
        ({"reason": "a" * 64}, "no reason"),
        ({"step": -1}, "no step"),
        ({"step": 1 << 63}, "no step"),
        ({"notice": True}, "a notice of no time"),
        ({"notice": True, "parameters": {WAITED_MS: True}}, "a notice of no time"),
        ({"number": -1}, "no number of an answer"),
        ({"more": True}, "no number of an answer"),
        ({"outputs": (Tensor("OUTPUT", "INT32", (2,), bytes(4)),)}, "has 4 bytes"),
        ({"outputs": (Tensor("OUTPUT", "INT32", (-1, -1), bytes(4)),)}, "has no shape"),
        ({"outputs": (Tensor("OUTPUT", "BYTES", (1 << 63,), b""),)}, "has no shape"),
        ({"outputs": (Tensor("OUTPUT", "INT33", (1,), bytes(4)),)}, "has no known datatype"),
    ],
)
def test_a_reply_that_no_client_could_read_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_reply(encode(ReplyMessage("1", **fields)))
