"""How processes end: how they are told to, and in words."""

from __future__ import annotations

import signal

SAME_STOP_S = 0.1
"""A stop that comes again within this time is no second one. GNU's `timeout` sends its signal to the process and to its
group; nobody presses keys so fast."""


def ending(code: int) -> str:
    """What a process did at its end: "exited with code 1". code: as in `subprocess`, negative for a signal"""
    if code >= 0:
        return f"exited with code {code}"
    # Most real-time signals have no name, and a process may be killed by any of them.
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}"
