"""Which configuration is measured next, and which one is best: coordinate descent over the knobs of a model. Pure.

From the given configuration one knob at a time is turned step by step, up and down, as long as each step is better by
more than the noise. When a whole round over all knobs has found nothing better, the search is over. Everything follows
from what was measured so far, so a search that was interrupted goes on by being asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

NOISE_MIN = 0.03
"""A difference below this is never called one: two meshes with the same configuration differ by as much."""

Setting = tuple[tuple[str, int | str], ...]
"""A configuration: each knob's name with its value, in the order of the knobs."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A part of the configuration that may be turned.

    values     in their order
    only_with  another knob and its value, without which this one means nothing; ("", "") if it always does
    """

    name: str
    values: tuple[int | str, ...]
    meaning: str = ""
    only_with: tuple[str, str] = ("", "")

    def turned(self, setting: Setting, by: int) -> Setting | None:
        """The setting with this knob's next value in a direction; None at its end, or where it has no meaning."""
        now = dict(setting)
        other, value = self.only_with
        if self.name not in now or (other and now.get(other) != value):
            return None
        index = self.values.index(now[self.name]) + by
        if not 0 <= index < len(self.values):
            return None
        return tuple((name, self.values[index] if name == self.name else value) for name, value in setting)


class Measured(msgspec.Struct, frozen=True):
    """What one setting gave: medians over the rounds.

    noise    how far the rounds' throughputs lie apart, as a share of it: half of largest minus smallest
    problem  why the figures do not count: it could not be loaded, or answered with errors; "" if they do. With a
             problem only steps_per_s is there: 0 if no step was answered
    """

    steps_per_s: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    memory_bytes: int = 0
    noise: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting may take. 0: no bound"""

    p99_ms: float = 0.0
    memory_bytes: int = 0

    def excess(self, found: Measured) -> float:
        """By what share the figures are beyond the bounds; 0 within them."""
        return max(
            found.p99_ms / self.p99_ms - 1 if self.p99_ms else 0.0,
            found.memory_bytes / self.memory_bytes - 1 if self.memory_bytes else 0.0,
            0.0,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that is to be measured. why: for the progress"""

    setting: Setting
    why: str


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The end of a search. complete: no knob is left to turn; if not, the number of trials was used up"""

    best: Setting
    complete: bool


def noise_of(*found: Measured) -> float:
    """The share below which a difference between measurements is noise: the largest of their own."""
    return max(NOISE_MIN, *(one.noise for one in found))


def is_better(new: Measured, old: Measured, bounds: Bounds) -> bool:
    """Whether a setting is preferred by more than the noise: first what works, then what keeps the bounds, then
    throughput.
    """
    noise = noise_of(new, old)
    if new.problem or old.problem:
        return bool(old.problem) and not new.problem
    beyond, before = bounds.excess(new), bounds.excess(old)
    if beyond or before:
        return beyond < before if not beyond or not before else beyond < before * (1 - noise)
    return new.steps_per_s > old.steps_per_s * (1 + noise)


def follow(
    start: Setting, knobs: Sequence[Knob], found: Mapping[Setting, Measured], bounds: Bounds, trials_max: int
) -> Trial | Conclusion:
    """What is to be measured next, or how the search ended, by what was measured so far."""
    if start not in found:
        return Trial(start, "the given configuration")
    best = start
    improved = True
    while improved:
        improved = False
        for knob in knobs:
            for by in (1, -1):
                turned = knob.turned(best, by)
                while turned is not None:
                    if turned not in found:
                        if len(found) >= trials_max:
                            return Conclusion(best, complete=False)
                        return Trial(turned, change(best, turned))
                    if not is_better(found[turned], found[best], bounds):
                        break
                    best, improved = turned, True
                    turned = knob.turned(best, by)
    return Conclusion(best, complete=True)


def change(old: Setting, new: Setting) -> str:
    """In which knobs two settings differ, as a text."""
    before = dict(old)
    return ", ".join(f"{name} {before.get(name)} -> {value}" for name, value in new if before.get(name) != value)
