"""What an executor reports of its machine: read from the operating system and the driver, or left out."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from executor.reporting import reports
from executor.reporting.host import Host
from executor.reporting.nvml import Nvml, load_nvml
from shared.contract.ids import ExecutorId
from shared.statistics.reports import ExecutorReport, GpuReport, HostReport

MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:   400 kB\nHugePages_Total:  0\n"


def test_the_machine_is_as_busy_as_it_was_since_the_last_report(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "stat").write_text("cpu 100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1 1\n")
    host = Host(tmp_path)
    (tmp_path / "stat").write_text("cpu 150 0 125 725 100 0 0 0 75 0\n")

    assert HostReport(0.75, 1_024_000, 614_400) == host.report()
    assert 0.0 == host.report().cpu_utilization


class FullRedis:
    """Reports of which the first is refused."""

    def __init__(self) -> None:
        self.tries = 0
        self.written = asyncio.Event()

    async def write(self, report: ExecutorReport) -> None:
        self.tries += 1
        if self.tries == 1:
            raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        self.written.set()


async def test_a_report_that_redis_has_no_memory_for_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor must not end for it."""
    monkeypatch.setattr(reports, "REPORT_INTERVAL_S", 0.0)
    redis: Any = FullRedis()
    reporter = reports.Reporter(redis, ExecutorId("a"), list, Host(), Nvml(None, ()))

    running = asyncio.create_task(reporter.run())
    await redis.written.wait()
    running.cancel()

    assert redis.tries >= 2


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path) -> None:
    assert HostReport(0.0, 0, 0) == Host(tmp_path).report()


class Driver:
    """NVML as seen from C: two cards, of which the second tells neither its power nor its energy."""

    OK, NOT_SUPPORTED = 0, 3

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's names
        return self.OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, place: Any) -> int:  # noqa: N802
        if index.value > 1:
            return self.NOT_SUPPORTED
        place._obj.value = 100 + index.value
        return self.OK

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = b"GPU-%d" % device.value
        return self.OK if size.value >= ctypes.sizeof(text) else self.NOT_SUPPORTED

    def nvmlDeviceGetUtilizationRates(self, device: Any, place: Any) -> int:  # noqa: N802
        place._obj.gpu = 25
        return self.OK

    def nvmlDeviceGetMemoryInfo(self, device: Any, place: Any) -> int:  # noqa: N802
        place._obj.total, place._obj.used = 80 << 30, 1 << 30
        return self.OK

    def nvmlDeviceGetPowerUsage(self, device: Any, place: Any) -> int:  # noqa: N802
        return self._tell(device, place, 300_500)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, place: Any) -> int:  # noqa: N802
        return self._tell(device, place, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, place: Any) -> int:  # noqa: N802
        return self._tell(device, place, 12_500)

    def _tell(self, device: Any, place: Any, value: int) -> int:
        if device.value != 100:
            return self.NOT_SUPPORTED
        place._obj.value = value
        return self.OK


def test_gpus_are_reported_in_tritons_units_and_without_what_they_do_not_tell() -> None:
    assert (
        GpuReport("GPU-100", 0.25, 80 << 30, 1 << 30, 300.5, 700.0, 12.5),
        GpuReport("GPU-101", 0.25, 80 << 30, 1 << 30),
    ) == Nvml(Driver(), (0, 1, 2)).report()


def test_without_a_gpu_none_is_reported() -> None:
    assert () == load_nvml(()).report()
    assert () == Nvml(None, (0,)).report()
