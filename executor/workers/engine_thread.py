"""A thread that makes calls for an event loop, one at a time, in the order in which they were given.

`concurrent.futures` does the same for any number of threads and callers. But its two futures per call, each with a lock
and a condition, take longer than one step of a small model.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class EngineThread:
    """The thread; it ends with `stop`, or with the process. name: of the thread"""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._open = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether every call of `start` has been made, and the loop knows."""
        return self._open == 0

    def start(self, call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[R]:
        """Makes a call after the calls before it; an exception goes to the future. A call whose future is cancelled
        before its turn is not made.
        """
        return self._given(lambda future: self._tell(future, *_outcome(future, call, *arguments, **named)))

    def start_with(self, other: EngineThread, call: Callable[[], Callable[[], R]]) -> asyncio.Future[R]:
        """As `start`, for a call that begins something: it returns a second call, which the other thread makes, while
        this one goes on. The future is that of the second call.
        """

        def begin(future: asyncio.Future[R]) -> None:
            try:
                second = call()
            except BaseException as failure:  # noqa: BLE001 - as below
                self._tell(future, future.set_exception, failure)
            else:
                other.post(lambda: self._tell(future, *_outcome(future, second)))

        return self._given(begin)

    def _given(self, make: Callable[[asyncio.Future[R]], None]) -> asyncio.Future[R]:
        """What is to be made on the thread, unless its future is cancelled before."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._open += 1
        self._calls.put(lambda: self._tell(future, future.cancel, None) if future.cancelled() else make(future))
        return future

    def run(self, call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """As `start`, for a caller that may block: returns what the call returns, and raises what it raises."""
        done: Future[R] = Future()

        def make() -> None:
            try:
                done.set_result(call(*arguments, **named))
            except BaseException as failure:  # noqa: BLE001 - as above
                done.set_exception(failure)

        self._calls.put(make)
        return done.result()

    def post(self, call: Callable[[], None]) -> None:
        """Makes a call, which must not raise, after the calls before it. May be called from any thread."""
        self._calls.put(call)

    def stop(self) -> None:
        """The thread ends after the calls that it was given."""
        self._calls.put(None)

    async def end(self, call: Callable[[], object], limit_s: float) -> bool:
        """Makes a last call, and ends behind it. Raises what that raises. False: it takes longer and is left behind."""
        last = self.start(call)
        self.stop()
        ended, _ = await asyncio.wait([last], timeout=limit_s)
        if ended:
            # What the last call referred to is free then.
            self._thread.join()
            await last
        return bool(ended)

    def end_now(self, call: Callable[[], object]) -> None:
        """As `end`, for a caller that may block, without a limit."""
        try:
            self.run(call)
        finally:
            self.stop()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # While the thread waits it would keep the rows of its last batch, the results, and who waited for them.
            del call

    def _tell(self, future: asyncio.Future[Any], set_outcome: Callable[[Any], object], outcome: object) -> None:
        # RuntimeError: the loop is closed, so no task waits.
        with suppress(RuntimeError):
            future.get_loop().call_soon_threadsafe(self._conclude, future, set_outcome, outcome)

    def _conclude(self, future: asyncio.Future[Any], set_outcome: Callable[[Any], object], outcome: object) -> None:
        self._open -= 1
        # The caller may have been cancelled meanwhile.
        if not future.done():
            set_outcome(outcome)


def made(call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[R]:
    """As `EngineThread.start`, for a call that is made at once, on the thread of the event loop."""
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(call(*arguments, **named))
    except BaseException as failure:  # noqa: BLE001 - as below
        future.set_exception(failure)
    return future


def _outcome(
    future: asyncio.Future[R], call: Callable[P, R], *arguments: P.args, **named: P.kwargs
) -> tuple[Callable[[Any], object], object]:
    """Makes a call. How its outcome is given to the future, and the outcome."""
    try:
        return future.set_result, call(*arguments, **named)
    except BaseException as failure:  # noqa: BLE001 - a model may raise anything; it is for the caller
        return future.set_exception, failure
