"""What a test's model meets when it runs: its batch is noted, and it waits until each of its values may pass.

The python backend runs in the test's own process, so model and test share this module.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tests.executor.patience import PATIENCE_S


class Gate:
    """Batches, in the order in which they began, as lists of values; `passed` are those that may end."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self._closed: set[int] = set()
        self._changed = threading.Condition()

    def enter(self, values: Sequence[int]) -> None:
        """Called by the model. Blocks while one of the values is held."""
        with self._changed:
            self.batches.append(list(values))
            passed = self._changed.wait_for(lambda: not self._closed & set(values), PATIENCE_S)
        assert passed, f"nobody let {values} pass"

    def hold(self, *values: int) -> None:
        """Batches with one of these wait from now on."""
        with self._changed:
            self._closed |= set(values)

    def release(self, *values: int) -> None:
        """Lets values pass, all of them if none is named."""
        with self._changed:
            self._closed -= set(values) or set(self._closed)
            self._changed.notify_all()

    def began(self, value: int) -> bool:
        """Whether a batch with that value has begun."""
        return any(value in batch for batch in self.batches)


gate = Gate()


@contextmanager
def new_gate() -> Generator[Gate]:
    """A fresh gate for one test; nothing is held afterwards."""
    global gate  # noqa: PLW0603 - the model of the running test finds it here
    gate = Gate()
    try:
        yield gate
    finally:
        gate.release()
