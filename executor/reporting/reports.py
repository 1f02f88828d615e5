"""Tells the mesh, about once a second, what only this process knows: memory, hardware, requests that wait here, and the
metrics that models make for themselves. Gateways show it (`shared.statistics.reports`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from executor.engine.python.model_metrics import custom_families
from executor.reporting.host import host_report
from executor.reporting.nvml import Nvml
from shared.contract.ids import ExecutorId
from shared.statistics.reports import ExecutorReport, ModelReport
from shared.store.intervals import at_intervals
from shared.store.reporting import Reports

REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes one executor's reports.

    models  reports of the models served at the moment
    """

    reports: Reports
    executor: ExecutorId
    models: Callable[[], Iterable[ModelReport]]
    gpus: Nvml

    async def run(self) -> None:
        """Reports for ever."""

        async def write() -> None:
            await self.reports.write(await self.report())

        await at_intervals(REPORT_INTERVAL_S, write, "report delayed", at_once=True)

    async def report(self) -> ExecutorReport:
        # A driver that does not answer must not hold up the loop, which renews the lease.
        gpus = await asyncio.to_thread(self.gpus.report)
        return ExecutorReport(
            executor=self.executor,
            host=socket.gethostname(),
            machine=host_report(),
            models=tuple(self.models()),
            gpus=gpus,
            families=custom_families(),
        )
