"""What the NVIDIA driver tells of the GPUs: its management library (NVML), called without a binding of Python's.

The few calls that metrics need are plain C functions that fill a number or a struct. Where the library or a single
number is missing (a small card has no power meter) that is what is reported: nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from shared.statistics.reports import GpuReport

LIBRARY = "libnvidia-ml.so.1"
UUID_CHARACTERS = 96
OK = 0


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The GPUs of this machine, as far as this process may use them.

    library  the loaded library, or None where there is no driver
    """

    def __init__(self, library: Any, indexes: Sequence[int]) -> None:
        self._library = library
        self._devices: list[tuple[str, Any]] = []
        if library is None or library.nvmlInit_v2() != OK:
            return
        for index in indexes:
            device = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(UUID_CHARACTERS)
            if (
                library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == OK
                and library.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(UUID_CHARACTERS)) == OK
            ):
                self._devices.append((uuid.value.decode(), device))

    def report(self) -> tuple[GpuReport, ...]:
        """Every GPU now."""
        return tuple(self._report(uuid, device) for uuid, device in self._devices)

    def _report(self, uuid: str, device: Any) -> GpuReport:
        utilization = self._filled("nvmlDeviceGetUtilizationRates", device, _Utilization())
        memory = self._filled("nvmlDeviceGetMemoryInfo", device, _Memory())
        return GpuReport(
            uuid=uuid,
            utilization=None if utilization is None else utilization.gpu / 100,
            memory_total=None if memory is None else memory.total,
            memory_used=None if memory is None else memory.used,
            power_usage=self._thousandth("nvmlDeviceGetPowerUsage", device, ctypes.c_uint()),
            power_limit=self._thousandth("nvmlDeviceGetEnforcedPowerLimit", device, ctypes.c_uint()),
            energy=self._thousandth("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.c_ulonglong()),
        )

    def _filled(self, function: str, device: Any, place: Any) -> Any:
        """What a call writes; None when the device does not tell."""
        return place if getattr(self._library, function)(device, ctypes.byref(place)) == OK else None

    def _thousandth(self, function: str, device: Any, place: Any) -> float | None:
        """Milliwatts and millijoules in their unit."""
        filled = self._filled(function, device, place)
        return None if filled is None else filled.value / 1000


def load_nvml(indexes: Sequence[int]) -> Nvml:
    """The GPUs with these indexes; none where the driver is not installed."""
    if not indexes:
        return Nvml(None, ())
    try:
        return Nvml(ctypes.CDLL(LIBRARY), indexes)
    except OSError:
        return Nvml(None, ())
