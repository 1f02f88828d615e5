"""The answers to open requests of a model in a process of its own: handed to its executor (`open_requests`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from executor.engine.base import RowError, RowResult
from executor.engine.python.process.messages import Answered, AnswersTaken, answer_bytes, sendable_error

ANSWERS_MAX = 256
BYTES_MAX = 1 << 20
"""Answers of one process that its executor has not taken, and their bytes; the last one may exceed it."""


class Window:
    """The answers of this process that are on their way to the executor. May be used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._bytes = 0

    def enter(self, size: int, is_wanted: Callable[[], bool]) -> bool:
        """Waits for room; False if the answer is not wanted any more."""
        with self._changed:
            while is_wanted() and (self._count >= ANSWERS_MAX or self._bytes >= BYTES_MAX):
                self._changed.wait()
            if not is_wanted():
                return False
            self._count += 1
            self._bytes += size
            return True

    def left(self, taken: AnswersTaken) -> None:
        with self._changed:
            self._count -= taken.count
            self._bytes -= taken.bytes
            self._changed.notify_all()

    def look(self) -> None:
        """Something is not wanted any more."""
        with self._changed:
            self._changed.notify_all()


class RemoteAnswers:
    """See `executor.engine.base.Answers`. The state of a last answer is the executor's to keep: it alone knows whether
    the request is over.
    """

    def __init__(self, number: int, window: Window, send: Callable[[Answered], None]) -> None:
        self.is_cancelled = False
        self._number = number
        self._window = window
        self._send = send
        self._has_ended = False

    def send(self, answer: RowResult | RowError) -> None:
        size = answer_bytes(answer) if isinstance(answer, RowResult) else 0
        if self._window.enter(size, lambda: not (self.is_cancelled or self._has_ended)):
            self._say(answer, last=False)

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        # The collector of garbage may call it, on any thread and in the middle of anything: it must not wait.
        if not self._has_ended:
            self._has_ended = True
            self._say(last, last=True)

    def _say(self, answer: RowResult | RowError, *, last: bool) -> None:
        if isinstance(answer, RowResult):
            self._send(Answered(self._number, answer, None, last))
        else:
            self._send(Answered(self._number, None, sendable_error(answer), last))

    def not_wanted(self) -> None:
        """Nobody waits for further answers."""
        self.is_cancelled = True
        self._window.look()
