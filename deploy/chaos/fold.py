"""The oracle: what each step of a sequence must answer. Pure.

The state of a sequence is the number of its values and a fold over them. Every answer is the state after its step. So a
step that is lost, doubled, reordered, or from another sequence shows in its answer and in every later one.

The models under `model/` do the same arithmetic in the executors. They share no code with this module: a shared mistake
would not show.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

FACTOR = 6364136223846793005
"""Knuth's multiplier: odd, and far from any small number, so that exchanged values do not cancel out."""
MASK = (1 << 63) - 1
"""The fold is a non-negative INT64."""


class FoldState(NamedTuple):
    """The state of a sequence after a step: the fold of its values, and their number."""

    fold: int
    length: int


BEGINNING = FoldState(0, 0)


def after(state: FoldState, value: int) -> FoldState:
    return FoldState((state.fold * FACTOR + value + state.length + 1) & MASK, state.length + 1)


def folded(values: Iterable[int]) -> FoldState:
    """The state of a sequence that was sent these values."""
    return reduce(after, values, BEGINNING)


def answers(values: Iterable[int]) -> list[FoldState]:
    """The right answer to each step, in order."""
    _, *states = accumulate(values, after, initial=BEGINNING)
    return states
