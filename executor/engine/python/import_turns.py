"""Models are imported one by one, because their imports share `sys.path` and `sys.modules`; but not behind one that
hangs.

Who waits for an import that has taken `LIMIT_S` goes on without it: what that import has added to `sys.path` and
`sys.modules` is taken away. Should it go on by itself, it finds the files of no model any more, and may meet what
another one has imported. So its load fails, whatever became of it.

The end of a model waits for no import: what it takes away goes when the import that is under way has ended.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

LIMIT_S = 300.0
"""How long an import holds up the others: as long as a load holds up the start of an executor."""

log = logging.getLogger(__name__)


class ImportTurn:
    """Imports of which each holds up the next. next: the turn of the others, once one of its imports was given up"""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.next: ImportTurn | None = None
        self._guard = threading.Lock()
        self._until = math.inf
        self._name = ""
        self._leave: Callable[[], None] = lambda: None

    @contextmanager
    def importing(self, name: str, leave: Callable[[], None]) -> Generator[None]:
        """Within the block something is imported. leave: takes away what it has added; called once, at the end of the
        block or, from another thread, when the import is given up
        """
        self._name, self._leave, self._until = name, leave, time.monotonic() + LIMIT_S
        try:
            yield
        finally:
            with self._guard:
                self._until = math.inf
                if self.next is None:
                    leave()

    @property
    def left_s(self) -> float:
        """How long to wait before the present import may be given up."""
        return max(0.0, min(self._until - time.monotonic(), LIMIT_S))

    def give_up(self) -> None:
        """Gives the present import up, if it has taken too long."""
        with self._guard:
            if self.next is None and self._until <= time.monotonic():
                log.warning("the import of %s has taken %g s: others go on without it", self._name, LIMIT_S)
                following = ImportTurn()
                # Nobody imports before everything is taken away.
                with following.lock:
                    self.next = following
                    self._leave()


class ImportTurns:
    def __init__(self) -> None:
        self._latest = ImportTurn()
        self._due: deque[Callable[[], None]] = deque()

    @contextmanager
    def alone(self) -> Generator[ImportTurn]:
        """Within the block no other thread is in such a block, but one whose import was given up."""
        turn = self._entered()
        try:
            self._make_up()
            yield turn
        finally:
            turn.lock.release()
            self.soon()

    def soon(self, *changes: Callable[[], None]) -> None:
        """Makes changes at once if nobody is in such a block, or else before anybody enters the next one. They must not
        raise. Waits for nothing.
        """
        self._due += changes
        while self._due:
            turn = self._latest
            while turn.next is not None:
                turn = turn.next
            if not turn.lock.acquire(blocking=False):
                # Whoever has it looks again when it is free.
                return
            try:
                self._make_up()
            finally:
                turn.lock.release()

    def _make_up(self) -> None:
        while self._due:
            self._due.popleft()()

    def _entered(self) -> ImportTurn:
        turn = self._latest
        while True:
            if turn.next is not None:
                turn = turn.next
            elif not turn.lock.acquire(timeout=turn.left_s):
                turn.give_up()
            elif turn.next is None:
                self._latest = turn
                return turn
            else:
                turn.lock.release()
