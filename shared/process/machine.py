"""What this machine, or the container, lets a process have: memory, cores and open files. And which processes it has.

source  cgroup v2: memory.max, cpu.max; v1: memory.limit_in_bytes, cpu.cfs_quota_us; of the group and its parents;
        getrlimit(2), RLIMIT_NOFILE
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OPEN_FILES_WANTED = 16384
"""Open files that a service asks for; systems give a process 1024 unless it asks. Each client of a gateway takes one.
So does each model that a scheduler leads, for a connection to Redis; one without state takes an executor two."""


def is_running(pid: int) -> bool:
    """Whether this machine has such a process, also one of another user. Raises OverflowError for an impossible id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def available_bytes(cgroup: Path = CGROUP, root: Path = CGROUP_ROOT) -> int:
    """The machine's memory, or the container's limit if that is smaller."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, is_unified in groups("memory", cgroup, root):
        limit = read_text(group / ("memory.max" if is_unified else "memory.limit_in_bytes"))
        if limit.isdecimal():
            found.append(int(limit))
    return min(found)


def available_cores(cgroup: Path = CGROUP, root: Path = CGROUP_ROOT) -> int:
    """The cores on which this process may run, or as many whole ones as the container's quota is worth; at least 1."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group, is_unified in groups("cpu", cgroup, root):
        names = ("cpu.max",) if is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, *period = " ".join(read_text(group / name) for name in names).split() or [""]
        # Without a quota the first word is "max" or -1.
        if quota.isdecimal() and period:
            found.append(int(quota) // int(period[0]))
    return max(1, min(found))


def fill_standard_streams() -> list[int]:
    """Opens those of the descriptors 0 to 2 that are closed, on nothing, and returns them. Else the next socket or file
    would be one of them: it would get what is printed, or the log, and processes that are started would lack it.
    """
    filled: list[int] = []
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free one, unless another thread has just taken that.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(opened, True)  # noqa: FBT003
                filled.append(opened)
            else:
                os.close(opened)
    return filled


def raise_open_files() -> int:
    """Raises this process's limit of open files to OPEN_FILES_WANTED, if the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return OPEN_FILES_WANTED if soft == resource.RLIM_INFINITY else soft


def groups(controller: str, cgroup: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's group and of its parents, each with whether it is of cgroup v2."""
    for line in read_text(cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        own = base / path.lstrip("/")
        for group in (own, *own.parents):
            if group == base.parent:
                break
            # In a container the path may be the host's, of which only the root exists here.
            yield group, controllers == ""


def read_text(path: Path) -> str:
    """The text of a small file; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
