"""What the scripts are told of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.requests.exchange.script_calls import PATIENCE_US_MAX, patience_us
from gateway.requests.infer_call import InferCall


@pytest.mark.parametrize(
    ("timeout_us", "wait_max_ms", "ignored", "expected"),
    [
        (0, 0, False, 0),
        (5_000, 0, False, 5_000),
        (5_000, 3, False, 3_000),
        (5_000, 3, True, 3_000),
        (5_000, 0, True, 0),
        (2**64 - 1, 2**63, False, PATIENCE_US_MAX),
    ],
)
def test_the_shorter_patience_counts_and_no_script_meets_a_time_that_it_cannot_write(
    timeout_us: int, wait_max_ms: int, ignored: bool, expected: int
) -> None:
    call = InferCall("m", timeout_us=timeout_us, wait_max_ms=wait_max_ms)
    pending = SimpleNamespace(call=call, admitted=SimpleNamespace(timeout_is_ignored=ignored))

    assert expected == patience_us(cast(Any, pending))
