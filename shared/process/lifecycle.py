"""The life of a service process: event loop, signals, tasks with an owner, exit code.

A service is `async def serve(tasks, stop)`. It starts its background tasks with `tasks.start`, says `stop.started()`,
waits for `stop.wait()`, drains, and returns; tasks that still run are then cancelled. A task that fails takes the whole
service down at once (it is logged, the exit code is 1): a process that lost one of its loops must not look alive.

SIGTERM or SIGINT, by the moment at which the first of them comes:

    modules are imported       the process ends (`end_when_told`)
    the service starts         it is cancelled, for nothing is to be drained. What a thread does then, for instance the
                               load of a model, is cut off after `CUT_OFF_S`
    the service has started    the stop is requested; a second signal cancels the service without draining

In the first two cases the exit code is 0 as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import uvloop

from shared.contract.errors import MeshError
from shared.process.logs import Level, log

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CANCEL_AGAIN_S = 0.1
"""How long a cancelled task may take to end before it is cancelled once more."""
CUT_OFF_S = 1.0
"""How long a thread may go on when the service has ended, or was told to while it started."""


class Stop:
    """The request to stop, seen by everybody who waits for it; made once, never taken back.

    has_started  whether the service ends by itself when it is told to; before that it is cancelled
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        self.has_started = False

    def started(self) -> None:
        """The service has begun what is to be ended in order."""
        self.has_started = True

    @property
    def requested(self) -> bool:
        """Whether the service should drain and end."""
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Asks the service to stop; the first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self) -> None:
        """Returns when the stop is requested."""
        await self._event.wait()


class Tasks:
    """The background tasks of one service. Every task has a name, and its failure is the service's."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Runs `work` until it returns, fails (which stops the service) or the service ends (which cancels it)."""
        task = self._group.create_task(self._watched(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A task that is cancelled before its first turn has not begun the work: then nobody else ends it.
        task.add_done_callback(lambda _: work.close())
        return task

    async def end_all(self) -> None:
        """Ends every running task; returns when they have ended."""
        await end(self._running)

    async def _watched(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as failure:
            log(Level.ERROR, "task failed", failure, task=name)
            raise


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks until they have ended.

    Once may not be enough: in Python 3.11 `asyncio.wait_for`, through which redis-py writes, loses a cancellation that
    comes just as it is done.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


Serve = Callable[[Tasks, Stop], Awaitable[None]]


def end_when_told() -> None:
    """From now on, until `run`, a stop signal ends the process: in a container too, where the first process hears of no
    signal that it has not asked for."""

    def end_now(*_: object) -> None:
        os._exit(0)

    for expected in STOP_SIGNALS:
        signal.signal(expected, end_now)


def run(serve: Serve) -> int:
    """Runs a service to its end on uvloop; returns the process's exit code: 0 after a stop, 1 after a failure."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with cut_off(0) as when_cancelled:
            code = runner.run(serve_until_stopped(serve, when_cancelled.start))
        with cut_off(code) as when_ended:
            # The runner waits for the threads of the loop, however long they take.
            when_ended.start()
            runner.close()
    return code


@contextmanager
def cut_off(code: int) -> Generator[threading.Timer]:
    """What ends the process with that exit code unless the block is left before `CUT_OFF_S` from its start."""

    def cut() -> None:
        log(Level.WARNING, "stopped: what still ran was cut off")
        logging.shutdown()
        os._exit(code)

    timer = threading.Timer(CUT_OFF_S, cut)
    timer.daemon = True
    try:
        yield timer
    finally:
        timer.cancel()


async def serve_until_stopped(serve: Serve, when_cancelled: Callable[[], None] = lambda: None) -> int:
    """`run` inside a loop that exists already. The signal handlers are in place until it returns.

    when_cancelled  called when the service is told to stop while it starts
    """
    stop = Stop()
    loop = asyncio.get_running_loop()
    this_task = asyncio.current_task()
    assert this_task is not None

    def on_signal(received: signal.Signals) -> None:
        if stop.requested:
            log(Level.WARNING, "second stop signal, not draining", signal=received.name)
            this_task.cancel()
        else:
            log(Level.INFO, "stopping" if stop.has_started else "stopping at the start", signal=received.name)
            stop.request(received.name)
            if not stop.has_started:
                when_cancelled()
                this_task.cancel()

    for expected in STOP_SIGNALS:
        loop.add_signal_handler(expected, on_signal, expected)
    try:
        return await outcome(serve, stop)
    finally:
        for expected in STOP_SIGNALS:
            loop.remove_signal_handler(expected)


async def outcome(serve: Serve, stop: Stop) -> int:
    """The exit code of one service's life. Its own failure is logged here, a task's failure where it happened. One that
    says what to change (a MeshError) has no traceback."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            try:
                await serve(tasks, stop)
            except MeshError as refusal:
                log(Level.ERROR, "service failed", cause=refusal.message)
                raise
            except Exception as failure:
                log(Level.ERROR, "service failed", failure)
                raise
            await tasks.end_all()
    except asyncio.CancelledError:
        if not stop.requested:
            raise
        return int(stop.has_started)
    except ExceptionGroup:
        # Each member was logged, with its traceback, by whoever saw it first.
        return 1
    log(Level.INFO, "stopped", reason=stop.reason or "finished")
    return 0
