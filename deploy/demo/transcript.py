"""The answers to a text, the comparison of two runs, and how long clients waited. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class AnsweredPiece:
    """The answer to one piece.

    content             the bytes of the outputs, which must be the same in every run
    sent_s, answered_s  seconds of one monotonic clock
    """

    content: tuple[bytes, ...]
    sent_s: float
    answered_s: float

    @property
    def waited_s(self) -> float:
        return self.answered_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs of a text differ: the first piece, counted from 0, with a different answer."""

    text: int
    piece: int
    expected: str
    got: str


def first_differences(
    undisturbed: Sequence[Sequence[AnsweredPiece]], disturbed: Sequence[Sequence[AnsweredPiece]]
) -> list[Difference]:
    """Per text that differs, where it begins to; bit for bit. Empty when the runs are equal.

    The arguments hold one sequence of answers per text, in the same order of texts.
    """
    found: list[Difference] = []
    for text, (expected, got) in enumerate(zip(undisturbed, disturbed, strict=True)):
        for piece, (one, other) in enumerate(zip_longest(expected, got)):
            if one is None or other is None or one.content != other.content:
                found.append(Difference(text, piece, shown(one), shown(other)))
                break
    return found


def shown(answer: AnsweredPiece | None) -> str:
    """An answer's last output in quotes, or that there was no answer."""
    return "no answer" if answer is None else repr(answer.content[-1].decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class FeltTakeover:
    """How long clients waited because of a kill, in seconds.

    longest_wait_s  per text (index) of the killed executor: the longest wait for an answer after the kill
    others_wait_s   the longest wait meanwhile of texts on other executors; None if the killed one held all
    usual_wait_s    median wait for all answers before the kill
    """

    longest_wait_s: dict[int, float]
    others_wait_s: float | None
    usual_wait_s: float


def felt(transcripts: Sequence[Sequence[AnsweredPiece]], held: Iterable[int], killed_s: float) -> FeltTakeover:
    """How long callers waited when an executor that held the texts `held` was killed at `killed_s`."""
    after = [
        max((answer.waited_s for answer in answers if answer.answered_s >= killed_s), default=0.0)
        for answers in transcripts
    ]
    before = sorted(answer.waited_s for answers in transcripts for answer in answers if answer.answered_s < killed_s)
    held = sorted(set(held))
    others = [wait_s for text, wait_s in enumerate(after) if text not in held]
    return FeltTakeover(
        longest_wait_s={text: after[text] for text in held},
        others_wait_s=max(others) if others else None,
        usual_wait_s=before[len(before) // 2] if before else 0.0,
    )
