"""How busy this machine's processors are, and how much of its memory is in use, as the operating system tells.

Triton's meaning (triton-spec 7): the whole machine, not this process. Where nothing is told (a sandbox without /proc),
all numbers are 0.
"""

from __future__ import annotations

import psutil

from shared.statistics.reports import HostReport


def host_report() -> HostReport:
    """The machine now; utilization since the call before, which psutil remembers."""
    try:
        memory = psutil.virtual_memory()
        return HostReport(psutil.cpu_percent() / 100, memory.total, memory.total - memory.available)
    except OSError:
        return HostReport(0.0, 0, 0)
