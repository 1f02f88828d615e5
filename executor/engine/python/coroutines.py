"""The event loop on which an `async def execute` runs, as in Triton: the instance's own, on a thread beside batches.

So what a model binds to its loop in one batch, such as a client with open connections, it finds again in the next, and
tasks that `execute` leaves behind run on. A model that is not asynchronous finds a loop, too, which it runs itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, cast

CLOSING_S = 5.0
"""How long the coroutines of a model that is unloaded may take to end."""

_ENDING = (SystemExit, KeyboardInterrupt)
"""What ends an event loop if a task raises it."""

log = logging.getLogger(__name__)


class Coroutines:
    """The loop of one instance; made when it is first needed."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._ended: asyncio.AbstractEventLoop | None = None
        # A model is asked whether it is ready beside its batches.
        self._starting = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether coroutines may run: the loop is there, and not being closed."""
        return self._loop is not None

    def start(self) -> int:
        """Makes the loop, if there is none. Returns its thread (`threading.get_ident`)."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                name = f"{self._instance} coroutines"
                thread = threading.Thread(target=self._serve, args=(self._loop,), name=name, daemon=True)
                thread.start()
                assert thread.ident is not None, "it has been started"
                self._thread = thread.ident
            return self._thread

    def begin(self, coroutine: Coroutine[Any, Any, object]) -> Future[object]:
        """Runs a coroutine, with the caller's context, once the loop is started."""
        assert self._loop is not None, "it has been started"
        return asyncio.run_coroutine_threadsafe(_contained(coroutine), self._loop)

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Its result, or what it raises. The calling thread waits for it."""
        result = self.begin(coroutine).result()
        if isinstance(result, _Exit):
            raise result.wanted
        return result

    def close(self) -> None:
        """Ends what the model has left running on the loop."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        stopped = asyncio.run_coroutine_threadsafe(_end_all(), loop)
        # If the model blocks its loop, the thread is left: it is a daemon. A task that ends may cancel all others.
        with suppress(TimeoutError, CancelledError):
            stopped.result(CLOSING_S)
        self._ended = loop
        # RuntimeError: what the model left running has stopped the loop, which is closed now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        # The model may stop its loop, or let a task end it: the batches to come need it.
        while self._ended is not loop:
            try:
                loop.run_forever()
            except _ENDING:
                log.exception("a task of model instance '%s' wanted to end the process", self._instance)
        loop.close()


@contextmanager
def thread_loop() -> Generator[None]:
    """Within the block `asyncio.get_event_loop` gives a loop on this thread, as on the main thread, where Triton calls
    models.
    """
    if threading.current_thread() is threading.main_thread():
        yield
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        with suppress(RuntimeError):  # the model runs it on another thread
            loop.close()


class _Exit:
    """A coroutine raised one of `_ENDING`."""

    def __init__(self, wanted: BaseException) -> None:
        self.wanted = wanted


async def _contained(coroutine: Coroutine[Any, Any, object]) -> object:
    try:
        return await coroutine
    except _ENDING as wanted:
        return _Exit(wanted)


async def _end_all() -> None:
    others = asyncio.all_tasks() - {cast("asyncio.Task[None]", asyncio.current_task())}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
