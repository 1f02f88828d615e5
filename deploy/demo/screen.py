"""Shows progress while texts are streamed: on a terminal a live line per text, elsewhere a plain line now and then.

`TextView.line` is pure; `Screen` writes.
"""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TextIO, TypeVar

from deploy.local.terminal import can_redraw, printable, styled

PATIENCE_S = 0.3
"""A text whose answer takes longer than this is shown as waiting."""
PLAIN_EVERY = 12
"""Without a terminal, a line is printed for every twelfth piece of a text."""
MIDDLE_MIN_COLUMNS, TAIL_COLUMNS = 10, 25


@dataclass(slots=True, kw_only=True)
class View(ABC):
    """What a live line shows.

    owner            name of the executor that holds the sequence; "" when unknown
    waiting_since_s  when the piece under way was sent; None when none is
    """

    owner: str = ""
    waiting_since_s: float | None = None

    def waits_s(self, now_s: float) -> float:
        """How long the piece under way has been waited for."""
        return 0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s

    @abstractmethod
    def line(self, number: int, columns: int, now_s: float) -> str:
        """One line of at most `columns` characters before styling."""


ViewT = TypeVar("ViewT", bound=View)


def middle_columns(columns: int, tail_columns: int) -> int:
    """Columns of the middle of a line, of those behind its head: the tail gives way before the middle does."""
    return max(min(MIDDLE_MIN_COLUMNS, columns), columns - tail_columns)


@dataclass(slots=True)
class TextView(View):
    """The present state of one text. answered, total: pieces"""

    total: int
    text: str = ""
    continuation: str = ""
    answered: int = 0

    def line(self, number: int, columns: int, now_s: float) -> str:
        """One line of at most `columns` characters before styling: who, how far, the text's end, the prediction."""
        head = f"{number:>2} {self.owner:<12.12} {self.answered:>3}/{self.total:<3} "[:columns]
        waits_s = self.waits_s(now_s)
        tail = f" ... {waits_s:.1f} s" if waits_s > PATIENCE_S else self.continuation
        rest = columns - len(head)
        room = middle_columns(rest, TAIL_COLUMNS)
        text = printable(self.text).rjust(room)
        color = "yellow" if waits_s > PATIENCE_S else "cyan"
        return styled(head, dim=True) + text[len(text) - room :] + styled(printable(tail)[: rest - room], fg=color)

    def plain_line(self, number: int) -> str:
        """A line without a terminal, for every twelfth piece and the last one; "" for the others."""
        if self.answered % PLAIN_EVERY and self.answered != self.total:
            return ""
        owner = f" on {self.owner}" if self.owner else ""
        end, continuation = printable(self.text)[-40:], printable(self.continuation)
        return f"  text {number}{owner}, {self.answered}/{self.total}: ...{end}[{continuation}]"


class Screen(Generic[ViewT]):
    """The views of a run, drawn as they change.

    out  by default standard output; live lines only when it is a terminal
    """

    def __init__(self, views: Sequence[ViewT], out: TextIO | None = None) -> None:
        self.views = views
        self._out = out or sys.stdout
        self._live = can_redraw(self._out)
        self._drawn_lines = 0

    def plain(self, text: str) -> None:
        """A line for where there are no live ones."""
        if not self._live:
            self._write(text + "\n")

    def refresh(self) -> None:
        """Draws the live lines again."""
        if not self._live:
            return
        columns = shutil.get_terminal_size().columns - 1
        lines = [view.line(number, columns, time.monotonic()) for number, view in enumerate(self.views, 1)]
        up = f"\x1b[{self._drawn_lines}A" if self._drawn_lines else ""
        self._write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
        self._drawn_lines = len(lines)

    def say(self, text: str) -> None:
        """A line of its own; the live lines go on below it."""
        if self._drawn_lines:
            # Go up to the first live line and clear the screen from there. The live lines are drawn again below.
            self._write(f"\x1b[{self._drawn_lines}A\r\x1b[J")
            self._drawn_lines = 0
        self._write(text + "\n")
        self.refresh()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
