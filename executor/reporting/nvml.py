"""What the NVIDIA driver tells of the GPUs, through its management library (NVML).

Where the driver, a device or a single number is missing (a small card has no power meter), that is what is reported:
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import pynvml

from shared.statistics.reports import GpuReport

driver: Any = pynvml  # its functions have no types


class Nvml:
    """The GPUs with these indexes of CUDA, as far as the driver knows them."""

    def __init__(self, indexes: Sequence[int]) -> None:
        self._indexes = indexes

    @cached_property
    def _devices(self) -> list[tuple[str, Any]]:
        """UUID and handle of each GPU."""
        found: list[tuple[str, Any]] = []
        with suppress(driver.NVMLError):
            if self._indexes:
                driver.nvmlInit()
        for name in _names(self._indexes):
            with suppress(driver.NVMLError):
                device = _device(name)
                found.append((driver.nvmlDeviceGetUUID(device), device))
        return found

    def report(self) -> tuple[GpuReport, ...]:
        """Asks the driver, which may take its time: not for the event loop."""
        return tuple(_report(uuid, device) for uuid, device in self._devices)


def _names(indexes: Sequence[int]) -> list[str]:
    """What the driver calls these GPUs, by index or UUID. It knows all GPUs of the machine; CUDA numbers those that the
    process may see.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(map(str, indexes))
    names = [name.strip() for name in visible.split(",")]
    return [names[index] for index in indexes if index < len(names)]


def _device(name: str) -> Any:
    return driver.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else driver.nvmlDeviceGetHandleByUUID(name)


def _report(uuid: str, device: Any) -> GpuReport:
    utilization = _told(driver.nvmlDeviceGetUtilizationRates, device)
    memory = _told(driver.nvmlDeviceGetMemoryInfo, device)
    return GpuReport(
        uuid=uuid,
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_total=None if memory is None else memory.total,
        memory_used=None if memory is None else memory.used,
        power_usage=_thousandth(driver.nvmlDeviceGetPowerUsage, device),
        power_limit=_thousandth(driver.nvmlDeviceGetEnforcedPowerLimit, device),
        energy=_thousandth(driver.nvmlDeviceGetTotalEnergyConsumption, device),
    )


def _told(question: Callable[[Any], Any], device: Any) -> Any:
    """The driver's answer; None when the device does not tell."""
    try:
        return question(device)
    except driver.NVMLError:
        return None


def _thousandth(question: Callable[[Any], Any], device: Any) -> float | None:
    """Milliwatts and millijoules in their unit."""
    value = _told(question, device)
    return None if value is None else value / 1000
