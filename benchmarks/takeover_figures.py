"""The figures of takeovers: medians, and their tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import markdown, medians

AGED = 8
"""Sequences of each age."""


@dataclass(frozen=True, slots=True)
class Case:
    """A number of sequences, and of steps that each has behind it. played: how many of the steps were really sent."""

    steps: int
    sequences: int
    played: int


@dataclass(frozen=True, slots=True)
class Takeover:
    """One kill. taken: sequences of the dead executor; times from the end of its lease."""

    case: Case
    taken: int
    first_ms: float
    last_ms: float


@dataclass(frozen=True, slots=True)
class IdleTakeover:
    """One kill of an owner of idle sequences: the medians of their first and of their second steps, and the slowest
    step of a sequence on the other executor meanwhile."""

    sequences: int
    taken: int
    first_ms: float
    second_ms: float
    neighbour_ms: float


def summary(kills: Sequence[Takeover]) -> list[Takeover]:
    """The medians of each case."""
    cases = dict.fromkeys(kill.case for kill in kills)
    return [medians([kill for kill in kills if kill.case == case]) for case in cases]


def idle_summary(idle: Sequence[IdleTakeover]) -> list[IdleTakeover]:
    """The medians of each number of sequences."""
    counts = dict.fromkeys(kill.sequences for kill in idle)
    return [medians([kill for kill in idle if kill.sequences == count]) for count in counts]


def one_line(kill: Takeover) -> str:
    """A kill in a few words."""
    case = kill.case
    return (
        f"{case.sequences} sequences of {case.steps} steps ({case.played} played), {kill.taken} taken over: "
        f"first {kill.first_ms:.0f} ms, last {kill.last_ms:.0f} ms after the lease's end"
    )


def idle_line(kill: IdleTakeover) -> str:
    """A kill in a few words."""
    return (
        f"{kill.sequences} idle sequences, {kill.taken} taken over: first step {kill.first_ms:.1f} ms, second "
        f"{kill.second_ms:.1f} ms, a neighbour's slowest meanwhile {kill.neighbour_ms:.0f} ms"
    )


def idle_table(idle: Sequence[IdleTakeover]) -> str:
    """The medians as a Markdown table."""
    rows = [
        [str(k.sequences), str(k.taken), f"{k.first_ms:.1f}", f"{k.second_ms:.1f}", f"{k.neighbour_ms:.0f}"]
        for k in idle
    ]
    return markdown(["idle sequences", "taken over", "first step ms", "second ms", "neighbour's slowest ms"], rows)


def table(kills: Sequence[Takeover]) -> str:
    """The medians as a Markdown table."""
    rows = [
        [
            str(kill.case.steps),
            str(kill.case.played),
            str(kill.case.sequences),
            str(kill.taken),
            f"{kill.first_ms:.0f}",
            f"{kill.last_ms:.0f}",
        ]
        for kill in kills
    ]
    return markdown(["steps behind", "of these played", "sequences", "taken over", "first ms", "last ms"], rows)
