"""Calls of a model in a process of its own to other models: handed to the executor, which makes them (`made_calls`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from executor.engine.python import calls
from executor.engine.python.calls import CallAnswer, ModelCall
from executor.engine.python.process.messages import CallAnswered, GiveUpCall, MakeCall, ReadResponse

Send = Callable[[MakeCall | ReadResponse | GiveUpCall], None]


class RemoteCalls:
    """See `executor.engine.python.calls.Calls`.

    send  to the executor; may be called from any thread
    turn  how many calls the executor has made of this process
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.turn = 0
        self._open: dict[int, Future[Any]] = {}

    def start(self, call: ModelCall) -> Future[CallAnswer]:
        return self._asked(call.number, MakeCall(call, streamed=False, waits=self._waits()))

    def stream(self, call: ModelCall) -> RemoteStream:
        self._send(MakeCall(call, streamed=True, waits=0))
        return RemoteStream(self, call.number)

    def read(self, number: int) -> Future[CallAnswer | None]:
        return self._asked(number, ReadResponse(number, waits=self._waits()))

    def give_up(self, number: int) -> None:
        self._send(GiveUpCall(number))

    def answered(self, order: CallAnswered) -> None:
        """An answer has come. Does nothing if nobody wants it any more."""
        future = self._open.pop(order.number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(order.answer)

    def _waits(self) -> int:
        """In which of the executor's calls the instance waits for what the calling thread does; 0: in none."""
        turn = self.turn  # before the look: if that finds the call running, it is this one
        return turn if calls.instance_execution() is not None else 0

    def _asked(self, number: int, note: MakeCall | ReadResponse) -> Future[Any]:
        future: Future[Any] = Future()
        self._open[number] = future
        try:
            self._send(note)
        except BaseException:
            del self._open[number]
            raise
        future.add_done_callback(partial(self._done, number))
        return future

    def _done(self, number: int, future: Future[Any]) -> None:
        if future.cancelled():
            self._open.pop(number, None)
            self.give_up(number)


class RemoteStream:
    """See `executor.engine.python.calls.AnswerStream`."""

    def __init__(self, remote: RemoteCalls, number: int) -> None:
        self._remote = remote
        self._number = number

    def read(self) -> Future[CallAnswer | None]:
        return self._remote.read(self._number)

    def cancel(self) -> None:
        self._remote.give_up(self._number)
