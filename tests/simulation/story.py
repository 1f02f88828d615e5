"""What happened in a run, in order: for people when it fails, and to prove that a seed gives the same run again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from typing import Any, cast

from shared.process.logs import fields_of
from tests.simulation.virtual import RUNNING

LINES_KEPT = 20_000


class Story:
    """The last events, and a digest of all of them. violations: what must never happen, and did."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.events = 0
        self.violations: list[str] = []
        self._digest = hashlib.sha256()

    def tell(self, text: str) -> None:
        """Something happened, to the process that runs now (or outside of them all)."""
        process = RUNNING.get()
        line = f"{asyncio.get_running_loop().time():10.4f} {process.name if process else '-':<4} {text}"
        self.lines.append(line)
        self.events += 1
        self._digest.update(line.encode())

    def violate(self, text: str) -> None:
        """Something happened that must not."""
        self.tell(f"VIOLATION: {text}")
        self.violations.append(text)

    @property
    def digest(self) -> str:
        """Equal for equal stories."""
        return self._digest.hexdigest()


FAULTS_OF_OURS = frozenset(
    {"task failed", "service failed", "leader failed, rebuilding", "state contradicts itself, rebuilding"}
)
"""Events that say that a process, or a leader, could not go on. With a lost connection behind it that is allowed."""


class StoryHandler(logging.Handler):
    """The processes' own log lines, as a part of the story."""

    def __init__(self, story: Story, allowed: tuple[type[BaseException], ...]) -> None:
        super().__init__(logging.INFO)
        self._story = story
        self._allowed = allowed

    def emit(self, record: logging.LogRecord) -> None:
        event = record.getMessage()
        fields = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        self._story.tell(f"{event} {fields}".rstrip())
        error = record.exc_info[1] if record.exc_info else None
        if event in FAULTS_OF_OURS and error is not None and not self._is_allowed(error):
            self._story.violate(f"{event}: {_told(error)}")

    def _is_allowed(self, error: BaseException) -> bool:
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_allowed(one) for one in cast("Any", error).exceptions)
        return isinstance(error, self._allowed)


def _told(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_told(one) for one in cast("Any", error).exceptions)
    return f"{type(error).__name__}: {error}"
