"""What the operating system tells of this machine: how busy its processors are, how much of its memory is in use.

Triton's meaning (triton-spec 7): the whole machine, not this process. Linux only; elsewhere nothing is known and all
numbers are 0.
"""

from __future__ import annotations

from pathlib import Path

from shared.statistics.reports import HostReport

PROC = Path("/proc")
IDLE_COLUMNS = (3, 4)
"""Of the line `cpu` in /proc/stat: idle, and waiting for a disk."""


class Host:
    """Reads the machine; remembers the last reading, because utilization is a difference."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last = self._jiffies()

    def report(self) -> HostReport:
        """The machine now; utilization since the call before."""
        busy, total = self._jiffies()
        busy_before, total_before = self._last
        self._last = (busy, total)
        passed = total - total_before
        memory = self._memory()
        size = memory.get("MemTotal", 0)
        return HostReport(
            cpu_utilization=(busy - busy_before) / passed if passed > 0 else 0.0,
            memory_total=size,
            memory_used=size - memory.get("MemAvailable", size),
        )

    def _jiffies(self) -> tuple[int, int]:
        """Busy and all ticks of all processors together."""
        try:
            first, *_ = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return 0, 0
        # The last two columns, guests', are part of the first two.
        ticks = [int(text) for text in first.split()[1:9]]
        return sum(ticks) - sum(ticks[column] for column in IDLE_COLUMNS), sum(ticks)

    def _memory(self) -> dict[str, int]:
        """Fields of /proc/meminfo, bytes."""
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
        except OSError:
            return {}
        pairs = (line.split(":", 1) for line in lines)
        return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.strip().endswith("kB")}
