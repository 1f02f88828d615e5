"""Puts the answers of runs that go on side by side into the order in which the runs began. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gateway.bounds.unread_answers import answer_bytes
from shared.contract.errors import MeshError
from shared.contract.tensors import Tensor

Outcome = tuple[Tensor, ...] | MeshError


class RunAnswer(NamedTuple):
    """One answer of an ensemble, the error in its place, or None for nothing. is_last: of its run no other follows"""

    outcome: Outcome | None
    is_last: bool


Give = Callable[[RunAnswer], None]
NOTHING_MORE = RunAnswer(None, is_last=True)


class AnswersInOrder:
    """The runs whose answers are not all given on.

    give   takes the answers in their order
    count  counts bytes of answers that wait for those before them, negative ones when they go
    """

    def __init__(self, give: Give, count: Callable[[int], None]) -> None:
        self._give = give
        self._count = count
        self._runs: deque[deque[RunAnswer]] = deque()
        self._is_concluded = False

    def __len__(self) -> int:
        return len(self._runs)

    def add(self) -> Give:
        """Begins a run, behind all others. Returns what takes its answers."""
        run: deque[RunAnswer] = deque()
        self._runs.append(run)

        def give(answer: RunAnswer) -> None:
            run.append(answer)
            self._count(bytes_of(answer))
            if self._runs and self._runs[0] is run:
                self._give_on()

        return give

    def conclude(self) -> None:
        """No other run follows: the end of the last one is the end of all."""
        self._is_concluded = True
        if not self._runs:
            self._give(NOTHING_MORE)

    def _give_on(self) -> None:
        while self._runs and self._runs[0]:
            outcome, is_over = answer = self._runs[0].popleft()
            self._count(-bytes_of(answer))
            if is_over:
                self._runs.popleft()
            is_last = is_over and self._is_concluded and not self._runs
            if outcome is not None or is_last:
                self._give(RunAnswer(outcome, is_last))


def bytes_of(answer: RunAnswer) -> int:
    """Memory of an answer that waits."""
    return answer_bytes(answer.outcome if isinstance(answer.outcome, tuple) else ())
