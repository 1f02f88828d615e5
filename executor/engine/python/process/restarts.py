"""When the process of an instance may be started again. Pure."""

from __future__ import annotations

AT_ONCE = 3
"""After so many processes in a row that ran nothing, the next one waits."""
DELAY_S, DELAY_MAX_S = 0.25, 30.0


class Restarts:
    """A process that has run a batch is replaced at once. Of processes that end before that, in a row, each waits twice
    as long as the one before.

    reason  what became of the last process that ended; a part of a sentence
    """

    def __init__(self) -> None:
        self.reason = ""
        self._fruitless = 0
        self._due_s = 0.0

    def ran(self) -> None:
        """The process has run a batch."""
        self._fruitless = 0

    def ended(self, reason: str, now_s: float) -> None:
        """A process has ended, or could not be started."""
        self.reason = reason
        self._fruitless += 1
        beyond = self._fruitless - AT_ONCE
        self._due_s = now_s + (min(DELAY_MAX_S, DELAY_S * 2 ** min(beyond, 32)) if beyond >= 0 else 0.0)

    def wait_s(self, now_s: float) -> float:
        """How long no process may be started."""
        return max(0.0, self._due_s - now_s)
