"""How the kernel shares processors among the processes of a mesh.

A step passes through four processes, and each one wakes the next. By the kernel's usual policy the process that is
woken takes the processor from the one that woke it. Where processes outnumber processors, that breaks up what they do
in one go: a gateway that is about to send eight steps is stopped after the first, so each script call carries fewer
steps, and more of them are needed. By the policy SCHED_BATCH a process that is woken waits until a processor is free,
or until the running process has had its share of it.

Source: sched(7) of Linux, "SCHED_BATCH". The measurements: docs/decisions/0064-a-woken-process-waits-its-turn.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from shared.process import logs

CpuPolicy = Literal["batch", "normal"]

SCHEDULED = Path("/proc/self/schedstat")
"""Of the process's first thread: ns on a processor, ns ready and waiting for one, and how often it ran. Source: Linux'
documentation, "Scheduler Statistics".
"""


def schedule_by(policy: CpuPolicy) -> None:
    """Sets the policy of this thread, and of the threads and processes that it starts later.

    "normal" leaves the policy as it was inherited. So does "batch" where the system has no such policy, and where the
    process was started with a real-time policy. A system that forbids the change is named in the log.
    """
    if policy == "normal" or not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as refusal:
        logs.warning("cpu policy not set", policy=policy, cause=str(refusal), remedy="--cpu-policy normal")


def waited_s() -> float:
    """How long the first thread of this process was ready to run and waited for a processor; 0.0 where the system does
    not say.
    """
    try:
        _, waiting_ns, _ = SCHEDULED.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(waiting_ns) / 1e9
