"""The open requests of a model whose instance is a process, seen from its executor.

A request to a decoupled model is open from its first batch on, one to another model if its batch has ended without its
only answer.

A thread hands the process's answers on, because `Answers.send` waits. Nothing is handed on twice: when the process
ends, its open requests run again in another one, and as many of their first answers are dropped as have been handed on.
So a model must answer the same when it runs the same request on the same state, as after a takeover (decision 0047).

A request with which processes end again and again, and which gets no further in any of them, fails. Before it would,
it runs while no other such request does, so that it does not fail for what a neighbour has done.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from executor.engine.base import Answers, LateAnswer, Row, RowError, RowResult
from executor.engine.python.process.instance_process import InstanceProcess
from executor.engine.python.process.messages import Answered, AnswersTaken, NotWanted, answer_bytes
from executor.engine.python.response_senders import DiscardedAnswers

LOOK_S = 0.05
"""How often is looked whether requests are still wanted, and whether the process that runs them lives."""
LOSSES_MAX = 3
"""With so many processes in a row that a request has ended without a further answer, it fails."""
TAKEN_AT_ONCE = 32
"""After so many answers the process is told that they are taken; sooner if no other one has come."""

Result = RowResult | RowError


@dataclass(slots=True, eq=False)
class RequestInProcess:
    """A request in one pass over it.

    wanted     whether the last answer brings the state to the caller
    sent       answers of this pass that were handed on
    dropped    answers still to be dropped, because they were handed on when the pass ran before
    losses     processes that have ended since its latest new answer
    is_stray   its process has ended, and it does not run
    is_passed  the pass is over, and the request is not; answers may still be on their way
    is_told    the process knows that nobody waits for it
    """

    number: int
    row: Row
    answers: Answers
    wanted: bool
    sent: int = 0
    dropped: int = 0
    losses: int = 0
    is_stray: bool = False
    is_passed: bool = False
    is_told: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether it would fail if another process ended."""
        return not self.is_passed and self.losses == LOSSES_MAX - 1


class ReplayedAnswers(DiscardedAnswers):
    """The answers to a step that brings a new process to where its sequence is. ended: the last one has come"""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def end(self, last: Result, keep_state: Callable[[], None] | None = None) -> None:
        super().end(last, keep_state)
        self.ended.set()


class OpenRequests:
    """The requests, and the thread that hands their answers on.

    ended    notes the state after a request's last answer; called as `Answers.end` calls `keep_state`
    process  that runs them now
    stray    called now and then while that process does not live, or requests are to run again
    """

    def __init__(
        self,
        name: str,
        *,
        ended: Callable[[Row, Result], None],
        process: Callable[[], InstanceProcess | None],
        stray: Callable[[], None],
    ) -> None:
        self._ended = ended
        self._process = process
        self._stray = stray
        self._numbers = itertools.count(1)
        self._open: dict[int, RequestInProcess] = {}
        self._came: SimpleQueue[tuple[InstanceProcess, Answered] | threading.Event | None] = SimpleQueue()
        self._taken = AnswersTaken(0, 0)
        self._look_s = 0.0
        self._thread = threading.Thread(target=self._work, name=f"{name} answers", daemon=True)
        self._is_started = False

    # -- what the engine's thread asks --------------------------------------------------------------------------------

    def opened(self, row: Row, number: int = 0, *, wanted: bool) -> int:
        """The number under which a pass over a request runs now; 0 for a row that answers nobody. number: of a pass
        that runs again
        """
        answers = row.answers
        if answers is None:
            return 0
        request = self._open.get(number)
        if request is None:
            request = RequestInProcess(next(self._numbers), row, answers, wanted)
            self._open[request.number] = request
            if not isinstance(answers, LateAnswer):
                self._begin_to_look()
        request.dropped, request.is_stray, request.is_told = request.sent, False, False
        return request.number

    def _begin_to_look(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        self._came.put(threading.Event())

    def has(self, number: int) -> bool:
        """Whether a request is open still."""
        return number in self._open

    def ran(self, number: int, result: Result | None) -> None:
        """What the batch says of a row that was opened; None: it is not to be run again."""
        request = self._open.get(number)
        if isinstance(result, RowResult) and result.open:
            self._begin_to_look()
            return
        if request is None:
            return
        # A late answer is of one pass alone.
        if isinstance(result, RowResult) and result.again and not isinstance(request.answers, LateAnswer):
            request.is_passed = True
        else:
            self._forget(request)

    def strand(self) -> None:
        """The process has ended. Returns when all that it sent has been handed on."""
        if self._is_started:
            drained = threading.Event()
            self._came.put(drained)
            drained.wait()
        self._taken = AnswersTaken(0, 0)
        for one in self._all():
            if not (one.is_passed or one.is_stray):
                one.losses += 1
                one.is_stray = True

    @property
    def strays(self) -> list[RequestInProcess]:
        """The requests that are to run again."""
        return [one for one in self._all() if one.is_stray]

    def waits(self, stray: RequestInProcess) -> bool:
        """Whether a request is not to run again yet: it may be why processes end, and so may one that runs now."""
        return stray.is_suspect and any(one.is_suspect and not one.is_stray for one in self._all())

    def give_up(self, row: Row) -> None:
        """The row has failed, and its caller is told so."""
        for one in self._all():
            if one.answers is row.answers:
                self._open.pop(one.number, None)

    def fail(self, request: RequestInProcess, error: RowError) -> None:
        """Ends a request that does not run."""
        self._forget(request)
        request.answers.end(error)

    def close(self) -> None:
        if self._is_started:
            self._came.put(None)
            self._thread.join()

    # -- what comes from the process ----------------------------------------------------------------------------------

    def came(self, process: InstanceProcess, answered: Answered) -> None:
        """An answer has come. Does not wait."""
        self._came.put((process, answered))

    def _work(self) -> None:
        while True:
            if self._open and time.monotonic() >= self._look_s:
                self._look()
            try:
                one = self._came.get(timeout=LOOK_S if self._open else None)
            except Empty:
                continue
            if one is None:
                return
            if isinstance(one, threading.Event):
                # It may have kept an answer before it from being told as taken.
                if (process := self._process()) is not None:
                    self._tell_taken(process)
                one.set()
                continue
            self._take(*one)
            # While no other answer comes it would be kept.
            del one

    def _take(self, process: InstanceProcess, answered: Answered) -> None:
        result = answered.error if answered.result is None else answered.result
        request = self._open.get(answered.number)
        if request is not None and result is not None:
            if answered.last:
                self._end(request, result)
            elif request.dropped:
                request.dropped -= 1
            else:
                request.sent += 1
                request.losses = 0
                request.answers.send(result)
        if not answered.last:
            self._taken = AnswersTaken(self._taken.count + 1, self._taken.bytes + answer_bytes(answered.result))
        self._tell_taken(process)

    def _tell_taken(self, process: InstanceProcess) -> None:
        """Tells the process how many answers were taken, unless others follow at once."""
        if self._taken.count >= TAKEN_AT_ONCE or (self._taken.count and self._came.empty()):
            process.order(self._taken)
            self._taken = AnswersTaken(0, 0)

    def _end(self, request: RequestInProcess, last: Result) -> None:
        self._forget(request)
        told = last
        if isinstance(last, RowResult) and not request.wanted:
            told = msgspec.structs.replace(last, states={}, model_state=b"")
        request.answers.end(told, lambda: self._ended(request.row, last))

    def _look(self) -> None:
        self._look_s = time.monotonic() + LOOK_S
        process = self._process()
        if process is None or not process.is_alive:
            self._stray()
            return
        if self.strays:
            self._stray()
        for one in self._all():
            if not one.answers.is_cancelled:
                continue
            if one.is_passed:
                self._open.pop(one.number, None)
            elif not one.is_told:
                one.is_told = True
                process.order(NotWanted(one.number))

    def _forget(self, request: RequestInProcess) -> None:
        """The request is over, with all passes over it."""
        if isinstance(request.answers, LateAnswer):  # It has one pass. A whole batch of such requests ends at once.
            self._open.pop(request.number, None)
        else:
            self.give_up(request.row)

    def _all(self) -> list[RequestInProcess]:
        return list(self._open.values())
