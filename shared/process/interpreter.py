"""How the threads of a process share the interpreter."""

from __future__ import annotations

import sys

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from the event loop. With the default, 5 ms, a model's thread holds up the
steps of all others, and so does one that reads or writes large JSON: whoever waits for Redis and its client waits so
long for each of them."""


def share_often() -> None:
    """Sets that time for the whole process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
