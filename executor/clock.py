"""The clock of batching."""

from __future__ import annotations

import time


def monotonic_us() -> int:
    """Microseconds that never go back; comparable within this process only."""
    return time.monotonic_ns() // 1000
