"""Compares what two runs answered to the same steps. Pure.

Integers, booleans and BYTES must be the same. Numbers with a fraction may differ by `atol + rtol * |first run's|`, by
default not at all. A NaN equals a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.contract.tensors import FLOATS, Tensor, as_float, to_numpy


class ReplayAnswer(msgspec.Struct, frozen=True):
    """What a run answered to a step. error: its text; then there are no outputs"""

    outputs: tuple[Tensor, ...] = ()
    error: str = ""


class Tolerance(msgspec.Struct, frozen=True):
    """How far numbers with a fraction may be apart."""

    atol: float = 0.0
    rtol: float = 0.0


class OutputSummary(msgspec.Struct, frozen=True):
    """One output over all steps.

    compared    steps in which both runs gave it
    different   steps in which it differs by more than it may, or one run alone gave it
    first       the first of these, counted from START; None if there is none
    greatest    greatest difference of two numbers, also where it is small enough; None for BYTES, infinity where one
                is no finite number and the other is another one
    problem     what else is different in the first step: its form
    """

    name: str
    datatype: str
    compared: int
    different: int
    first: int | None
    greatest: float | None
    problem: str = ""


class Comparison(msgspec.Struct, frozen=True):
    """What two runs have in common.

    steps    steps that were compared
    first    the first one in which they differ, counted from START; None if they do not
    failure  how the last step that was compared failed in one of the runs alone; what follows builds on other states
    """

    steps: int
    first: int | None
    failure: str
    outputs: list[OutputSummary]


def compared(before: Sequence[ReplayAnswer], now: Sequence[ReplayAnswer], tolerance: Tolerance) -> Comparison:
    """before, now: the answers of both runs from START on; a longer one is compared as far as the other one goes"""
    summaries: dict[str, OutputSummary] = {}
    steps, failure = 0, ""
    for number, (one, other) in enumerate(zip(before, now, strict=False), 1):
        steps = number
        if bool(one.error) != bool(other.error):
            failure = f"failed before ({one.error})" if one.error else f"fails now ({other.error})"
            break
        first, second = ({tensor.name: tensor for tensor in each.outputs} for each in (one, other))
        for name in (*first, *(name for name in second if name not in first)):
            summaries[name] = _with_step(summaries.get(name), number, first.get(name), second.get(name), tolerance)
    firsts = [one.first for one in summaries.values() if one.first is not None]
    if failure:
        firsts.append(steps)
    return Comparison(steps, min(firsts, default=None), failure, list(summaries.values()))


def _with_step(
    known: OutputSummary | None, number: int, one: Tensor | None, other: Tensor | None, tolerance: Tolerance
) -> OutputSummary:
    """A summary with one more step. one, other: the output of both runs; None where there is none"""
    given = one or other
    assert given is not None, "one of the runs gave it"
    known = known or OutputSummary(given.name, given.datatype, 0, 0, None, None)
    problem, greatest = _problem(one, other), None
    is_same = not problem
    if one is not None and other is not None and is_same:
        is_same, greatest = _difference(one, other, tolerance)
    is_first = known.first is None and not is_same
    return msgspec.structs.replace(
        known,
        compared=known.compared + (one is not None and other is not None),
        different=known.different + (not is_same),
        first=number if is_first else known.first,
        greatest=max((each for each in (known.greatest, greatest) if each is not None), default=None),
        problem=problem if is_first else known.problem,
    )


def _problem(one: Tensor | None, other: Tensor | None) -> str:
    """Why the numbers of two outputs cannot be compared; "" if they can."""
    if one is None or other is None:
        return f"given {'now' if one is None else 'before'} only"
    return "" if form(one) == form(other) else f"{form(one)} before, {form(other)} now"


def form(tensor: Tensor) -> str:
    return f"{tensor.datatype} {list(tensor.shape)}"


def _difference(one: Tensor, other: Tensor, tolerance: Tolerance) -> tuple[bool, float | None]:
    """Whether two tensors of one form are the same, and the greatest difference of their numbers."""
    if one.datatype == "BYTES":
        return one.raw == other.raw, None
    if one.raw == other.raw:
        return True, 0.0
    a, b = numbers(one), numbers(other)
    if one.datatype in FLOATS:
        with np.errstate(all="ignore"):
            is_same = bool(np.isclose(b, a, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True).all())
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        greatest = float(apart.max(initial=0.0))
        return is_same, math.inf if math.isnan(greatest) else greatest
    # Wraps around, and is right nevertheless: the difference of two integers of 64 bits is one without a sign.
    apart = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    greatest = float(int(apart.max(initial=0)))
    return greatest == 0.0, greatest


def numbers(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor; those with a fraction as 64 bits, in which each of them is exact."""
    return as_float(tensor) if tensor.datatype in FLOATS else to_numpy(tensor)
