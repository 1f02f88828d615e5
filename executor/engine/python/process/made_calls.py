"""The calls that a model in a process of its own makes of other models: the executor makes them (`remote_calls`).

They are the calls of a model in the executor's own process in everything but their numbers, which are unique in one
process only. When the process ends, its open calls are cancelled: what it runs is run again, with calls of the same
names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from executor.engine.python import calls
from executor.engine.python.calls import AnswerStream, CallAnswer, ModelCall
from executor.engine.python.model_metrics import TritonModelException
from executor.engine.python.process.messages import CallAnswered, GiveUpCall, MakeCall, ReadResponse
from shared.contract.errors import Code
from shared.process import logs


@dataclass(slots=True)
class OpenCall:
    """A call of the process. call: with this process's number; awaited: its answer, or next response"""

    call: ModelCall
    stream: AnswerStream | None = None
    awaited: Future[Any] | None = None


class MadeCalls:
    """The open calls of one process.

    version, instance  that call
    order              tells the process an answer; may be called from any thread, and returns at once
    """

    def __init__(self, version: str, instance: str, order: Callable[[CallAnswered], None]) -> None:
        self._version = version
        self._instance = instance
        self._order = order
        self._open: dict[int, OpenCall] = {}
        self._waited: set[int] = set()
        """For which of them the instance itself waits."""
        self._turns_over = 0
        """How many of the executor's calls of the process have their answers."""
        self._lock = threading.Lock()

    @property
    def are_awaited(self) -> bool:
        """Whether the instance waits for an answer now."""
        return bool(self._waited)

    def note(self, note: MakeCall | ReadResponse | GiveUpCall) -> None:
        """The process asks for something. Does not wait."""
        match note:
            case MakeCall():
                self._make(note)
            case ReadResponse():
                one = self._open.get(note.number)
                if one is None or one.stream is None:
                    self._order(CallAnswered(note.number, None))
                else:
                    self._read(note, one, one.stream)
            case GiveUpCall():
                one = self._give_up(note.number)
                if one is not None and one.stream is not None:
                    # A thread of the model may be reading it.
                    self._order(CallAnswered(note.number, None))

    def _make(self, note: MakeCall) -> None:
        number = note.call.number
        one = self._open[number] = OpenCall(msgspec.structs.replace(note.call, number=calls.next_number()))
        try:
            if note.streamed:
                one.stream = calls.door().stream(one.call)
            else:
                self._await(number, one, calls.door().start(one.call), waits=note.waits)
        except Exception as error:  # noqa: BLE001 - the model waits, and must learn of it
            refusal = NotMade(_refusal(one.call, error))
            if note.streamed:
                one.stream = refusal
            else:
                self._await(number, one, refusal.read(), waits=0)

    def _read(self, note: ReadResponse, one: OpenCall, stream: AnswerStream) -> None:
        try:
            self._await(note.number, one, stream.read(), waits=note.waits)
        except Exception as error:  # noqa: BLE001 - as in `_make`
            one.stream = NotMade(_refusal(one.call, error))
            self._await(note.number, one, one.stream.read(), waits=0)

    def _await(self, number: int, one: OpenCall, awaited: Future[Any], *, waits: int) -> None:
        one.awaited = awaited
        with self._lock:
            if waits > self._turns_over:
                self._waited.add(number)
                calls.begin_wait(one.call, self._version, self._instance)
        awaited.add_done_callback(partial(self._answered, number, one))

    def _answered(self, number: int, one: OpenCall, awaited: Future[Any]) -> None:
        self._end_wait(number, one)
        if self._open.get(number) is not one:
            return  # it was given up
        if awaited.cancelled():
            answer: CallAnswer | None = CallAnswer(error_code=Code.CANCELLED, error="the call was cancelled")
        else:
            answer = awaited.result()
        if one.stream is None or answer is None:
            self._open.pop(number, None)
        self._order(CallAnswered(number, answer))

    def turn_over(self) -> None:
        """A call of the process has its answer: for whatever it has left open, nobody waits. What it has said before
        may come only now, because a thread beside the calls reads it.
        """
        with self._lock:
            self._turns_over += 1
        for number in list(self._waited):
            one = self._open.get(number)
            if one is not None:
                self._end_wait(number, one)

    def cancel_all(self) -> None:
        """Cancels all open calls, because the process has ended."""
        for number in list(self._open):
            self._give_up(number)

    def _give_up(self, number: int) -> OpenCall | None:
        """Cancels a call. Returns it; None if it is not open."""
        one = self._open.pop(number, None)
        if one is not None:
            self._end_wait(number, one)
            if one.stream is not None:
                one.stream.cancel()
            elif one.awaited is not None:
                one.awaited.cancel()
        return one

    def _end_wait(self, number: int, one: OpenCall) -> None:
        with self._lock:
            self._waited.discard(number)
            calls.end_wait(one.call.number)


class NotMade:
    """See `executor.engine.python.calls.AnswerStream`: one response, which says why the call was not made."""

    def __init__(self, why: CallAnswer) -> None:
        self._left = [why]

    def read(self) -> Future[CallAnswer | None]:
        told: Future[CallAnswer | None] = Future()
        told.set_result(self._left.pop() if self._left else None)
        return told

    def cancel(self) -> None:
        self._left.clear()


def _refusal(call: ModelCall, error: Exception) -> CallAnswer:
    """The answer to a call that the door did not take."""
    if isinstance(error, TritonModelException):
        return CallAnswer(error_code=Code.UNAVAILABLE, error=str(error))
    logs.error("call failed unexpectedly", error, model=call.model)
    return CallAnswer(error_code=Code.INTERNAL, error=f"the call failed: {type(error).__name__}: {error}")
