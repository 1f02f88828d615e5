"""Notices that an executor stood still for longer than its lease lasts, and names the cause.

The event loop renews the lease. A call into a model that keeps the interpreter's lock (a C extension that does not
release it) stops the loop and every other thread. If it lasts longer than the lease, the lease is lost, and the next
owner of the same step loses its lease in the same way, until the step is given up (`LOST_OWNERS_MAX`). That cannot be
otherwise, since no owner can ever commit the step. But the operator must learn the cause, because from outside it looks
like a frozen process.

CPU time tells the two apart: a process that was frozen, or got no processor, has used none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from executor.workers.worker import EngineWorker
from shared.process import logs

REMEDY = "let the call release the interpreter's lock, or make --lease-ms longer than such a call may take"


class Watchdog:
    """Notices that the loop stood still.

    limit_s  how long the loop may stand still
    workers  the workers whose calls may be the cause
    """

    def __init__(self, limit_s: float, workers: Callable[[], Iterable[EngineWorker]]) -> None:
        self._limit_s = limit_s
        self._workers = workers

    async def sleep(self, seconds: float) -> None:
        """Sleeps; if the sleep took too long by the limit, logs that."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        stood_s = time.monotonic() - began_s - seconds
        if stood_s >= self._limit_s:
            self._tell(stood_s, time.process_time() - cpu_s)

    def _tell(self, stood_s: float, cpu_s: float) -> None:
        seconds, cpu_seconds = round(stood_s, 1), round(cpu_s, 1)
        instances = blocking_instances(self._workers(), cpu_s, self._limit_s)
        if instances:
            logs.error(
                "model held the interpreter for longer than the lease",
                instances=instances,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                remedy=REMEDY,
            )
        else:
            logs.warning("executor stood still for longer than its lease", seconds=seconds, cpu_seconds=cpu_seconds)


def blocking_instances(workers: Iterable[EngineWorker], cpu_s: float, limit_s: float) -> list[str]:
    """The instances whose latest call took longer than the limit. None if the process itself used less CPU time than
    that.
    """
    return [worker.name for worker in workers if worker.latest_call_s >= limit_s] if cpu_s >= limit_s else []
