"""What an error tells beside its text."""

from __future__ import annotations

import pytest

from shared.contract.errors import ERROR_CHARACTERS_MAX, Code, UnavailableError, code_of, shortened
from shared.contract.forecast import Outlook


@pytest.mark.parametrize(("wait_ms", "seconds"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (2000, 2), (None, None)])
def test_whoever_tries_again_after_the_seconds_that_are_told_does_not_come_too_early(
    wait_ms: int | None, seconds: int | None
) -> None:
    error = UnavailableError("later")
    error.wait_ms = wait_ms
    assert seconds == error.retry_after_s
    assert ({} if wait_ms is None else {"wait_ms": wait_ms}) == error.facts

    error.outlook = Outlook(3, 4001)
    assert (5, {"place": 3, "wait_ms": 4001}) == (error.retry_after_s, error.facts)


def test_a_code_of_a_newer_release_is_internal_here() -> None:
    assert [Code.CANCELLED, Code.INTERNAL] == [code_of("CANCELLED"), code_of("OF_TOMORROW")]


def test_a_long_text_loses_its_middle_and_keeps_more_of_its_end() -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(ERROR_CHARACTERS_MAX + 1))
    told = UnavailableError(text).message
    first, last = told[:100], told[-100:]

    assert (text[:100], text[-100:]) == (first, last)
    assert len(told) <= ERROR_CHARACTERS_MAX + 100
    assert "abc" == shortened("abcdefghi", 9)[:3]
    assert shortened("abcdefghi", 9).endswith("defghi")
    assert text[:-1] == UnavailableError(text[:-1]).message
