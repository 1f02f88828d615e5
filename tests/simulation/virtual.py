"""Virtual time: an event loop whose clock jumps to the next timer, and processes that live inside it.

A *process* is whatever runs in its context: tasks, timers and callbacks carry a context variable, and the loop looks at
it before it calls anything. What belongs to a process that is frozen or dead is not called but kept; a frozen one gets
it all when it wakes, as after SIGSTOP and SIGCONT, and for a dead one no clean-up runs at all.

The same seed gives the same run, bit by bit: time, chance and ids come from here, and what asyncio keeps in sets is
ordered by numbers of ours, not by addresses.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

EPOCH_S = 1_800_000_000
"""The wall clock when a run begins."""


CANCELLED_MAX = 400
"""Timers beyond which it is looked whether most of them were cancelled."""


class SimulatedProcess:
    """What the loop knows of a process. held: nothing of it runs; killed: tells whoever keeps it that it has crashed;
    None for one that can crash no more.
    """

    def __init__(self, name: str, killed: Callable[[], None] | None = None) -> None:
        self.name = name
        self.killed = killed
        self.held = False
        self.parked: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(RUNNING.set, self)

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine as a part of it."""
        return asyncio.get_running_loop().create_task(main, context=self.context, name=self.name)

    def hold(self) -> None:
        """Freezes it, or ends it if nobody calls `release`."""
        self.held = True

    def release(self) -> None:
        """Everything that came up meanwhile happens now."""
        self.held = False
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        parked, self.parked = self.parked, []
        loop.resume(parked)


RUNNING: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("running", default=None)
"""The process that runs; None for the world outside: clients, the store, the network."""


def crash() -> None:
    """Ends the process that runs now, as by a segmentation fault: nothing of it runs behind the present callback."""
    process = RUNNING.get()
    if process is None or process.killed is None:
        return
    process.hold()
    asyncio.get_running_loop().call_soon(process.killed, context=contextvars.Context())


class NothingLeftError(AssertionError):
    """Nobody waits for a time any more: the run hangs for ever."""


class OrderedTask(asyncio.Task[Any]):
    """A task that sorts by age where it is kept in a set."""

    ages = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._age = next(self.ages)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


def _ordered_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> OrderedTask:
    return OrderedTask(coro, loop=loop, **options)


class VirtualLoop(asyncio.BaseEventLoop):
    """Time passes only while nobody has anything to do.

    compute_s  how long a call on an executor (an engine's thread) takes
    """

    def __init__(self, compute_s: Callable[[], float]) -> None:
        super().__init__()
        self._now = 0.0
        self.compute_s = compute_s
        self._busy_until: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self.set_task_factory(_ordered_task)

    def time(self) -> float:
        """Seconds since the run began."""
        return self._now

    def _run_once(self) -> None:
        ready: Any = cast("Any", self)._ready
        timers = self._timers()
        if not ready and not cast("Any", self)._stopping:
            while timers and timers[0].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise NothingLeftError("nothing is left to wait for")
            self._now = max(self._now, timers[0].when())
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            if not timer.cancelled():
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            process: SimulatedProcess | None = handle._context.get(RUNNING)
            if process is not None and process.held:
                process.parked.append(handle)
            else:
                handle._run()

    def _timers(self) -> list[asyncio.TimerHandle]:
        """The heap of timers; most are of limits that were kept, and go before they make it slow."""
        base = cast("Any", self)
        if len(base._scheduled) > CANCELLED_MAX:
            left = [timer for timer in base._scheduled if not timer.cancelled()]
            if len(left) < CANCELLED_MAX // 2:
                base._scheduled = left
                heapq.heapify(left)
        return base._scheduled

    def resume(self, parked: list[asyncio.Handle]) -> None:
        """Calls these as soon as possible, before what comes later."""
        cast("Any", self)._ready.extend(parked)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """An executor's thread does one call after the other, each of which takes a while; the loop's own, none."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - as a thread hands on whatever was raised
                future.set_exception(error)

        if executor is None:
            self.call_soon(work)
        else:
            end = max(self._now, self._busy_until.get(executor, 0.0)) + self.compute_s()
            self._busy_until[executor] = end
            self.call_at(end, work)
        return future

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""


class VirtualThread:
    """In place of an engine's thread (`executor.workers.engine_thread.EngineThread`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open = 0

    @property
    def is_idle(self) -> bool:
        """See there."""
        return self._open == 0

    def start(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        """See there."""
        future = asyncio.get_running_loop().run_in_executor(cast("Any", self), partial(call, *arguments, **named))
        self._open += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._open -= 1

    def run(self, call: Callable[[], None]) -> None:
        """See there."""
        call()

    async def end(self, call: Callable[[], object], limit_s: float) -> bool:
        """See there."""
        call()
        return True

    def stop(self) -> None:
        """There is nothing to end."""


def _wall_s() -> float:
    return EPOCH_S + asyncio.get_running_loop().time()


def _monotonic_s() -> float:
    return 1000.0 + asyncio.get_running_loop().time()


@contextmanager
def virtual_world(seed: int, *, compute_s: Callable[[random.Random], float]) -> Generator[asyncio.Runner]:
    """A runner on virtual time, with clocks, chance and ids of the seed. compute_s: of one call of an engine."""
    chance = random.Random(f"engine {seed}")
    state = random.getstate()
    random.seed(seed)
    # The order of a set depends on how high the numbers are: a seed tells the same story behind whichever others.
    OrderedTask.ages = itertools.count(1)
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        for module, name, replacement in (
            (time, "time", _wall_s),
            (time, "time_ns", lambda: int(_wall_s() * 1e9)),
            (time, "monotonic", _monotonic_s),
            (time, "monotonic_ns", lambda: int(_monotonic_s() * 1e9)),
            (time, "perf_counter_ns", lambda: int(_monotonic_s() * 1e9)),
            # What this machine has computed is another thing each time, and a log line tells it.
            (time, "process_time", lambda: 0.0),
            (secrets, "token_hex", lambda size=4: random.randbytes(size).hex()),
            (secrets, "token_bytes", random.randbytes),
            (uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128), version=4)),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield stack.enter_context(asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: compute_s(chance))))
