"""What a call carries beside its request."""

from __future__ import annotations

import pytest

from shared.contract.calls import CALL_DEPTH_MAX, CallOrigin, call_value, models_of, read_call, waiting
from shared.contract.errors import RequestError
from shared.contract.ids import sequence_id


def test_a_call_s_origin_goes_through_metadata() -> None:
    chain = (waiting("m\u00e9, 1", sequence_id("m", "", 7)), waiting("b"))

    value = call_value("call-1/0", chain)

    assert value.isascii()
    assert CallOrigin("call-1/0", chain) == read_call(value)
    assert ["m\u00e9, 1", "b"] == models_of(chain)
    assert CallOrigin("") == read_call(call_value("", ()))


def test_steps_of_an_ensemble_have_names_of_their_own() -> None:
    origin = CallOrigin("call-1", ("a",), 5)

    assert CallOrigin("call-1/0", ("a",), 5) == origin.within("0")
    assert CallOrigin("", ("a",)) == CallOrigin("", ("a",)).within("0")


@pytest.mark.parametrize("value", ["call,a,,b", "call" + ",a" * (CALL_DEPTH_MAX + 1), "x" * 8000])
def test_what_no_executor_sends_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="must name a call"):
        read_call(value)
