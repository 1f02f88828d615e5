"""What an executor reports of its machine: read from the operating system and the driver, or left out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from redis.exceptions import ResponseError

from executor.reporting import reports
from executor.reporting.host import host_report
from executor.reporting.nvml import Nvml
from shared.contract.ids import ExecutorId
from shared.statistics.reports import ExecutorReport, GpuReport, HostReport

MEMINFO = {
    "MemTotal": 1000,
    "MemFree": 100,
    "MemAvailable": 400,
    "Buffers": 1,
    "Cached": 2,
    "Shmem": 3,
    "Active": 4,
    "Inactive": 5,
}
"""Kilobytes."""


def test_the_machine_is_as_busy_as_it_was_since_the_last_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "meminfo").write_text("".join(f"{name}: {size} kB\n" for name, size in MEMINFO.items()))
    (tmp_path / "stat").write_text("cpu 100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1 1\n")
    host_report()
    (tmp_path / "stat").write_text("cpu 150 0 125 725 100 0 0 0 75 0\n")

    assert HostReport(0.75, 1_024_000, 614_400) == host_report()
    assert 0.0 == host_report().cpu_utilization


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
    reporter = reports.Reporter(redis, ExecutorId("a"), list, Nvml(()))

    running = asyncio.create_task(reporter.run())
    await redis.written.wait()
    running.cancel()

    assert redis.tries >= 2


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    assert HostReport(0.0, 0, 0) == host_report()


class Driver:
    """NVML with two cards, of which the second tells neither its power nor its energy. A handle is a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        self._answers("nvmlDeviceGetHandleByIndex", lambda index: index + 100 if index < 2 else _refuse())
        self._answers("nvmlDeviceGetHandleByUUID", lambda uuid: int(uuid.removeprefix("GPU-")))
        self._answers("nvmlDeviceGetUUID", "GPU-{}".format)
        self._answers("nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=25, memory=50))
        self._answers("nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30))
        self._tells_of_the_first("nvmlDeviceGetPowerUsage", 300_500)
        self._tells_of_the_first("nvmlDeviceGetEnforcedPowerLimit", 700_000)
        self._tells_of_the_first("nvmlDeviceGetTotalEnergyConsumption", 12_500)

    def _answers(self, function: str, answer: Callable[[Any], Any]) -> None:
        self._monkeypatch.setattr(pynvml, function, answer)

    def _tells_of_the_first(self, function: str, value: int) -> None:
        self._answers(function, lambda device: value if device == 100 else _refuse())


def _refuse(_device: Any = None) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_gpus_are_reported_in_tritons_units_and_without_what_they_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)

    assert (
        GpuReport("GPU-100", 0.25, 80 << 30, 1 << 30, 300.5, 700.0, 12.5),
        GpuReport("GPU-101", 0.25, 80 << 30, 1 << 30),
    ) == Nvml((0, 1, 2)).report()


@pytest.mark.parametrize("visible", ["1", "GPU-101,0", "1, 0, 1"])
def test_the_first_gpu_is_the_first_of_those_that_the_process_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """CUDA numbers them anew; the driver knows all of the machine."""
    Driver(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert ["GPU-101"] == [gpu.uuid for gpu in Nvml((0, 9)).report()]


async def test_a_driver_that_takes_its_time_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop renews the lease."""
    Driver(monkeypatch)
    asked_by: set[threading.Thread] = set()

    def noted(name: str) -> Callable[..., Any]:
        answer = getattr(pynvml, name)

        def ask(*arguments: Any) -> Any:
            asked_by.add(threading.current_thread())
            return answer(*arguments)

        return ask

    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"):
        monkeypatch.setattr(pynvml, name, noted(name))
    redis: Any = None
    reporter = reports.Reporter(redis, ExecutorId("a"), list, Nvml((0,)))

    assert ["GPU-100"] == [gpu.uuid for gpu in (await reporter.report()).gpus]
    assert threading.main_thread() not in asked_by


def test_a_gpu_whose_driver_has_gone_is_reported_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    gpus = Nvml((0,))
    for function in ("UtilizationRates", "MemoryInfo", "PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{function}", _refuse)

    assert (GpuReport("GPU-100"),) == gpus.report()


def test_without_a_gpu_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("it was asked"))

    assert () == Nvml(()).report()


def test_without_a_driver_no_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)

    assert () == Nvml((0,)).report()
