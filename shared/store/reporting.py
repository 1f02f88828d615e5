"""Executors' reports in Redis: one string per executor, with a short TTL. Gateways read the reports of living
executors.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.contract.ids import ExecutorId
from shared.statistics.reports import ExecutorReport, decode_report, encode_report
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.reading import value_of

REPORT_TTL_MS = 10_000
"""Ten reports may be missed; then the executor's numbers are not shown any more."""


class Reports:
    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys

    async def write(self, report: ExecutorReport) -> None:
        await self._redis.set(self._keys.report(ExecutorId(report.executor)), encode_report(report), px=REPORT_TTL_MS)

    async def read(self, executors: Iterable[ExecutorId]) -> list[ExecutorReport]:
        """The reports of these executors, as far as there are any."""
        names = [self._keys.report(executor) for executor in executors]
        if not names:
            return []
        found = [
            value_of(name, data, decode_report)
            for name, data in zip(names, await self._redis.mget(names), strict=True)
            if data is not None
        ]
        return [report for report in found if report is not None]
