"""The line of one recording: what was heard so far, as a strip from its beginning to its end. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from deploy.demo.screen import PATIENCE_S, View, middle_columns
from deploy.demo.vad.segments import BEGINS, PIECE_S, Segmenter
from deploy.local.terminal import styled

SPEECH, PAUSE, UNHEARD = "█", "·", " "
PLAIN = {SPEECH: "#", PAUSE: ".", UNHEARD: " "}
"""The same for a terminal that lacks those characters."""
TAIL_COLUMNS = 24


@dataclass(slots=True)
class RecordingView(View):
    """The present state of one recording. total: pieces"""

    total: int
    plain: bool = False
    probabilities: list[float] = field(default_factory=list[float])
    segmenter: Segmenter = field(default_factory=Segmenter)

    def line(self, number: int, columns: int, now_s: float) -> str:
        """One line of at most `columns` characters before styling: who, the strip, and what is going on."""
        head = f"{number:>2} {self.owner:<10.10} "[:columns]
        rest = columns - len(head)
        strip = self.strip(middle_columns(rest, TAIL_COLUMNS))
        waits_s = self.waits_s(now_s)
        tail, color = self._tail(), "cyan"
        if waits_s > PATIENCE_S:
            tail, color = f" waits {waits_s:.1f} s", "yellow"
        return styled(head, dim=True) + _painted(strip) + styled(tail[: rest - len(strip)], fg=color)

    def strip(self, columns: int) -> str:
        """The recording in so many characters: a column is speech if most of its pieces are."""
        marks = ""
        for column in range(columns):
            begin, end = column * self.total // columns, max(1, (column + 1) * self.total // columns)
            heard = self.probabilities[begin : max(end, begin + 1)]
            speech = sum(probability >= BEGINS for probability in heard)
            marks += UNHEARD if not heard else SPEECH if 2 * speech > len(heard) else PAUSE
        return "".join(PLAIN[mark] for mark in marks) if self.plain else marks

    def _tail(self) -> str:
        at_s = len(self.probabilities) * PIECE_S
        now = "done" if len(self.probabilities) == self.total else "speech" if self.segmenter.speaks else "pause"
        return f" {at_s:5.1f} s {now:<6} {len(self.segmenter.segments):>2} found"


def _painted(strip: str) -> str:
    """The strip, its speech in green."""
    parts = ("".join(marks) for _, marks in groupby(strip))
    return "".join(
        styled(part, fg="green") if part[0] in (SPEECH, PLAIN[SPEECH]) else styled(part, dim=True) for part in parts
    )
