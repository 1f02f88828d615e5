"""How a process ended, in words."""

from __future__ import annotations

import signal


def ending(code: int) -> str:
    """What a process did at its end: "exited with code 1". code: as in `subprocess`, negative for a signal"""
    if code >= 0:
        return f"exited with code {code}"
    # Most real-time signals have no name, and a process may be killed by any of them.
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}"
