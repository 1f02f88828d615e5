"""The life of a service process: event loop, signals, tasks with an owner, exit code.

A service is `async def serve(tasks, stop)`. It starts its background tasks with `tasks.start`, calls `stop.started()`,
waits for `stop.wait()`, drains, and returns; tasks that still run are then cancelled. A task that fails takes the whole
service down at once (it is logged, the exit code is 1): a process that lost one of its loops must not look alive.

The effect of the first SIGTERM or SIGINT depends on when it comes:

    modules are imported       the process ends (`end_when_told`)
    the service starts         it is cancelled, because there is nothing to drain. A thread that still runs, for
                               instance the load of a model, is cut off after `CUT_OFF_S`
    the service has started    the stop is requested; a second signal cancels the service without draining

In the first two cases the exit code is 0 as well. One that comes within `SAME_STOP_S` is no second one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import cache
from typing import Any

import uvloop

from shared.contract.errors import MeshError
from shared.process.endings import SAME_STOP_S
from shared.process.logs import Level, log
from shared.process.machine import raise_open_files

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CANCEL_AGAIN_S = 0.1
"""How long a cancelled task may take to end before it is cancelled once more."""
CUT_OFF_S = 1.0
"""How long a thread may go on after the service has ended, or was told to stop while it started."""


class Stop:
    """The request to stop, for all tasks that wait for it. It is made once, and never taken back.

    has_started  whether the service ends by itself when told to; before that it is cancelled
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        self.has_started = False

    def started(self) -> None:
        """From now on the service ends by itself when told to. Tells systemd so, where it waits for that."""
        self.has_started = True
        if address := os.environ.get("NOTIFY_SOCKET"):
            tell_systemd(address)

    @property
    def requested(self) -> bool:
        """Whether the service should drain and end."""
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Asks the service to stop."""
        self.reason = reason
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


def tell_systemd(address: str) -> None:
    """Says that the service has started, as sd_notify(3). address: a path; with @ before it an abstract name"""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(b"READY=1", f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError as error:
        log(Level.WARNING, "systemd not told of the start", cause=str(error))


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
        # A task that is cancelled before its first turn has not begun the coroutine, which must then be closed here.
        task.add_done_callback(lambda _: work.close())
        return task

    async def end_all(self) -> None:
        """Ends every running task; returns when they have ended."""
        await end(self._running)

    async def _watched(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as failure:
            # Raised again: the task group then cancels the service.
            log(Level.ERROR, "task failed", failure, task=name)
            raise


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks until they have ended.

    Once may not be enough: in Python 3.11 `asyncio.wait_for`, which redis-py uses to write, loses a cancellation that
    comes just as it is done.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


GIVEN_UP = "the handler is closed"
"""How uvloop's error ends about a transport that is closed."""

FAILED_CONNECTION = "Unhandled exception in client_connected_cb"
"""What asyncio says of an exception in what serves a connection of `asyncio.start_server`."""

Serve = Callable[[Tasks, Stop], Awaitable[None]]


def end_when_told() -> None:
    """From now on, until `run`, a stop signal ends the process. Without a handler the first process of a container
    would not get the signal.
    """

    def end_now(*_: object) -> None:
        os._exit(0)

    for expected in STOP_SIGNALS:
        signal.signal(expected, end_now)


def run(serve: Serve, failed: int = 1) -> int:
    """Runs a service to its end on uvloop; returns the process's exit code: 0 after a stop, `failed` after a failure.

    The caller is to end the process with it: what runs on after `CUT_OFF_S` is cut off.
    """
    raise_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(tell_failure)
        when_cancelled = cut_off(0)
        try:
            code = failed if runner.run(serve_until_stopped(serve, when_cancelled.start)) else 0
        finally:
            when_cancelled.cancel()
        # The runner waits for the loop's threads, and Python for those of a model's pools, however long they take.
        cut_off(code).start()
    return code


def tell_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what fails in a loop with nobody to hear of it.

    But not that bytes came for a connection which was given up in the middle of TLS: uvloop calls that a fatal error,
    and a failover has dozens of them. Nor that a connection is lost for which Hypercorn has nothing to do but to wait
    for its end: a browser whose machine sleeps takes nothing more.
    """
    failure, message = context.get("exception"), context.get("message")
    if isinstance(failure, RuntimeError) and str(failure).endswith(GIVEN_UP):
        return
    if isinstance(failure, OSError) and message == FAILED_CONNECTION:
        return
    loop.default_exception_handler(context)


def cut_off(code: int) -> threading.Timer:
    """A timer that ends the process with that exit code, `CUT_OFF_S` after it was started."""

    def cut() -> None:
        log(Level.WARNING, "stopped: what still ran was cut off")
        logging.shutdown()
        os._exit(code)

    timer = threading.Timer(CUT_OFF_S, cut)
    timer.daemon = True
    return timer


async def serve_until_stopped(serve: Serve, when_cancelled: Callable[[], None] = lambda: None) -> int:
    """As `run`, inside a running loop. The signal handlers are in place until it returns.

    when_cancelled  called when the service is told to stop while it starts
    """
    stop = Stop()
    loop = asyncio.get_running_loop()
    this_task = asyncio.current_task()
    assert this_task is not None
    requested_s = 0.0

    def on_signal(received: signal.Signals) -> None:
        nonlocal requested_s
        if stop.requested:
            if loop.time() - requested_s < SAME_STOP_S:
                return
            log(Level.WARNING, "second stop signal, not draining", signal=received.name)
            this_task.cancel()
        else:
            log(Level.INFO, "stopping" if stop.has_started else "stopping at the start", signal=received.name)
            stop.request(received.name)
            requested_s = loop.time()
            if not stop.has_started:
                when_cancelled()
                this_task.cancel()

    keep_signals_of_forks_apart()
    for expected in STOP_SIGNALS:
        loop.add_signal_handler(expected, on_signal, expected)
    try:
        return await outcome(serve, stop)
    finally:
        for expected in STOP_SIGNALS:
            loop.remove_signal_handler(expected)


@cache
def keep_signals_of_forks_apart() -> None:
    """From now on a stop signal ends the process that a library forks from this one, and nothing else.

    A fork has the loop's signal handlers, and the socket by which they wake the loop. So what multiprocessing's `Pool`
    sends to its workers at its end would stop this service, and the workers would live on.
    """
    masks = threading.local()

    def hold() -> None:
        # A signal may come before the fork has run a line of Python.
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def take_leave() -> None:
        signal.set_wakeup_fd(-1)
        for expected in STOP_SIGNALS:
            signal.signal(expected, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=take_leave)


async def outcome(serve: Serve, stop: Stop) -> int:
    """Runs a service and returns its exit code. Its own failure is logged here; a task's failure was logged by the
    task. A MeshError, which says what to change, has no traceback.
    """
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
        # Each failure was logged where it happened, with its traceback.
        return 1
    log(Level.INFO, "stopped", reason=stop.reason or "finished")
    return 0
