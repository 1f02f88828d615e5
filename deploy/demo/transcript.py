"""The answers to a text, the comparison of two runs, and how long clients waited. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnsweredPiece:
    """The answer to one piece.

    next_character, continuation  the bytes of the outputs NEXT and CONTINUATION
    sent_s, answered_s            seconds of one monotonic clock
    """

    next_character: bytes
    continuation: bytes
    sent_s: float
    answered_s: float

    @property
    def waited_s(self) -> float:
        """How long the caller waited."""
        return self.answered_s - self.sent_s

    @property
    def content(self) -> tuple[bytes, bytes]:
        """The bytes that must be the same in every run."""
        return self.next_character, self.continuation


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
    assert len(undisturbed) == len(disturbed)
    found: list[Difference] = []
    for text, (expected, got) in enumerate(zip(undisturbed, disturbed, strict=True)):
        piece = first_difference([a.content for a in expected], [a.content for a in got])
        if piece is not None:
            found.append(Difference(text, piece, shown(expected, piece), shown(got, piece)))
    return found


def first_difference(expected: Sequence[object], got: Sequence[object]) -> int | None:
    """The first index at which two lists differ, the shorter one's end included; None when they are equal."""
    for index in range(max(len(expected), len(got))):
        if expected[index : index + 1] != got[index : index + 1]:
            return index
    return None


def shown(answers: Sequence[AnsweredPiece], piece: int) -> str:
    """An answer's continuation in quotes, or that there was none."""
    return repr(answers[piece].continuation.decode(errors="replace")) if piece < len(answers) else "no answer"


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
