"""A journal is read as a whole, or not at all."""

from __future__ import annotations

import pytest

from shared.contract.errors import NotDoneError
from shared.contract.messages import InferMessage, ReplyMessage, encode
from shared.store.journals import read_journal

STEP, ANSWER = encode(InferMessage("m", "1", "", 7, ())), encode(ReplyMessage("1"))
TWO = {"i:3": STEP, "o:3": ANSWER, "i:4": STEP, "o:4": ANSWER}
BYTES = b"%d" % sum(map(len, TWO.values()))


def test_its_last_step_alone_may_have_ended_the_run() -> None:
    steps = read_journal({**TWO, "n": b"4", "b": BYTES, "e": b"1"}, 3)

    assert [False, True] == [step.has_end for step in steps]
    assert [] == read_journal({}, 3)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({**TWO, "n": b"5", "b": BYTES}, "other steps than it says"),
        ({**TWO, "n": b"1000000000000", "b": BYTES}, "other steps than it says"),
        ({**TWO, "i:9": STEP, "o:9": ANSWER, "n": b"4", "b": BYTES}, "other steps than it says"),
        ({**TWO, "n": b"4", "b": b"1"}, "other bytes than it says"),
        ({**TWO, "n": b"four", "b": BYTES}, "cannot be read"),
        ({**TWO, "i:3": b"torn", "n": b"4", "b": BYTES}, "cannot be read"),
    ],
)
def test_what_is_no_journal_is_refused(fields: dict[str, bytes], complaint: str) -> None:
    with pytest.raises(NotDoneError, match=complaint):
        read_journal(fields, 3)
