"""What counts as a difference between two runs."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.operate.comparison import OutputSummary, ReplayAnswer, Tolerance, compared
from shared.contract.tensors import Tensor

EXACT = Tolerance()


def floats(*values: float, name: str = "Y") -> ReplayAnswer:
    return ReplayAnswer((Tensor(name, "FP32", (1, len(values)), struct.pack(f"<{len(values)}f", *values)),))


def integers(*values: int) -> ReplayAnswer:
    return ReplayAnswer((Tensor("Y", "INT64", (1, len(values)), struct.pack(f"<{len(values)}q", *values)),))


def of(before: ReplayAnswer, now: ReplayAnswer, tolerance: Tolerance = EXACT) -> OutputSummary:
    (summary,) = compared([before], [now], tolerance).outputs
    return summary


def test_the_first_step_and_the_greatest_difference_are_told() -> None:
    before = [floats(1, 2), floats(3, 4), floats(5, 6)]
    now = [floats(1, 2), floats(3, 4.5), floats(5.25, 6)]

    comparison = compared(before, now, EXACT)

    assert (3, 2) == (comparison.steps, comparison.first)
    assert [OutputSummary("Y", "FP32", 3, 2, 2, 0.5)] == comparison.outputs
    within = compared(before, now, Tolerance(atol=0.5))
    assert within.first is None
    assert [OutputSummary("Y", "FP32", 3, 0, None, 0.5)] == within.outputs
    assert 3 == compared(before, now, Tolerance(rtol=0.05)).steps
    assert 2 == compared(before, now, Tolerance(rtol=0.05)).first


@pytest.mark.parametrize(
    ("before", "now", "is_same", "greatest"),
    [
        (math.nan, math.nan, True, 0.0),
        (math.inf, math.inf, True, 0.0),
        (math.inf, -math.inf, False, math.inf),
        (math.nan, 1.0, False, math.inf),
        (0.0, -0.0, True, 0.0),
    ],
)
def test_numbers_that_are_none(before: float, now: float, *, is_same: bool, greatest: float) -> None:
    summary = of(floats(before), floats(now), Tolerance(atol=1e30))

    assert (not is_same, greatest) == (bool(summary.different), summary.greatest)


def test_numbers_that_are_none_are_no_difference_beside_one_within_the_tolerance() -> None:
    summary = of(floats(math.nan, math.inf, 1.0), floats(math.nan, math.inf, 1.5), Tolerance(atol=0.5))

    assert (0, 0.5) == (summary.different, summary.greatest)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_integers_are_exact_whatever_the_tolerance(before: int, now: int) -> None:
    summary = of(integers(0, before), integers(0, now), Tolerance(atol=1e30, rtol=1.0))

    assert (before != now, float(abs(before - now))) == (bool(summary.different), summary.greatest)


def test_texts_and_bf16() -> None:
    def text(word: bytes) -> ReplayAnswer:
        return ReplayAnswer((Tensor("Y", "BYTES", (1,), struct.pack("<I", len(word)) + word),))

    assert (0, None) == (of(text(b"a"), text(b"a")).different, of(text(b"a"), text(b"a")).greatest)
    assert (1, None) == (of(text(b"a"), text(b"b")).different, of(text(b"a"), text(b"b")).greatest)
    one, two = (ReplayAnswer((Tensor("Y", "BF16", (1,), bits),)) for bits in (b"\x80\x3f", b"\x00\x40"))
    assert 1.0 == of(one, two).greatest


def test_outputs_of_another_form_or_of_one_run_alone() -> None:
    assert "FP32 [1, 1] before, FP32 [1, 2] now" == of(floats(1), floats(1, 2)).problem
    lacking = compared([ReplayAnswer((*floats(1).outputs, *floats(1, name="Z").outputs))], [floats(1)], EXACT)
    assert ["", "given before only"] == [one.problem for one in lacking.outputs]
    assert 1 == lacking.first
    assert "given now only" == compared([ReplayAnswer()], [floats(1)], EXACT).outputs[0].problem
    # The form of the first different step is told, also if later ones have it right.
    both = compared([floats(1), floats(1)], [floats(1, 2), floats(3)], EXACT)
    assert (1, 2, 1, 2.0) == (
        both.first,
        both.outputs[0].different,
        both.outputs[0].first,
        both.outputs[0].greatest,
    )


def test_a_step_that_fails_on_one_side_ends_the_comparison() -> None:
    failed = ReplayAnswer(error="too much")
    fine = floats(1)

    assert compared([fine, failed, fine], [fine, failed, fine], EXACT).first is None
    now = compared([fine, fine, fine], [fine, failed], EXACT)
    assert (2, 2, "fails now (too much)") == (now.steps, now.first, now.failure)
    assert "failed before (too much)" == compared([failed], [fine], EXACT).failure
