"""What this process may take of the machine's memory, how that is shared out, and what happens near the bound.

What is counted (`gateway.bounds.byte_budget`, `gateway.bounds.unread_answers`) gets a share each. What nobody can count
(what a transport has received and not delivered, what decoding takes for a moment, what the allocator keeps) is seen in
the process's size, which is looked at many times a second: beyond a first mark memory is asked back from those who can
give it, beyond a second one nothing new is accepted until there is less of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.contract.errors import UnavailableError
from shared.process import logs

OWN_BYTES = 192 << 20
"""What a gateway takes without any request: the interpreter, its libraries, their threads."""
MEMORY_MIN = 384 << 20
LOOK_EVERY_S = 0.05
"""A client on the same machine sends some tens of MiB in this time."""
TIGHT_PART = 0.65
FULL_PART = 0.8
"""Of the bound. What is being decoded, and what arrives until the next look, still comes on top."""
MESSAGE_BYTES_MAX = 64 << 20
"""Of one request; Triton's bound on HTTP bodies."""
IN_FLIGHT_BYTES_MAX = 1 << 30
"""Redis holds as much."""
RPC_BYTES = 128 << 10
"""What an idle call takes: its metadata, its tasks, half a window of the transport's."""
RPCS_MAX = 10_000
TRIM_EVERY_S = 1.0
SAY_EVERY_S = 10.0
STATM = Path("/proc/self/statm")
CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """What is derived from a process's bound, unless it is given. Bytes, and calls.

    A request's bytes exist several times while it passes (received, decoded, encoded for Redis): in flight it gets a
    quarter.
    """

    in_flight: int
    unread: int
    message: int
    rpcs: int


def shares(memory_bytes_max: int) -> MemoryShares:
    """What each bound is by default."""
    rest = memory_bytes_max - OWN_BYTES
    return MemoryShares(
        in_flight=min(IN_FLIGHT_BYTES_MAX, rest // 4),
        unread=rest // 4,
        message=min(MESSAGE_BYTES_MAX, rest // 16),
        rpcs=min(RPCS_MAX, rest // 2 // RPC_BYTES),
    )


def available_bytes(cgroup: Path = CGROUP, root: Path = CGROUP_ROOT) -> int:
    """The machine's memory, or what the container may take of it.

    source  cgroup v2: memory.max; v1: memory.limit_in_bytes; the smallest on the way to the root
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = base / path.lstrip("/")
        for group in (own, *own.parents):
            if group == base.parent:
                break
            # In a container the path may be the host's, and only the root be there.
            limit = read_text(group / name)
            if limit.isdecimal():
                found.append(int(limit))
    return min(found)


def read_text(path: Path) -> str:
    """Of a small file; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def resident_bytes() -> int:
    """What this process holds in memory; 0 where the system does not say."""
    words = read_text(STATM).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


class MemoryBound:
    """This process's, against a bound.

    bytes_max  0: no bound
    resident   says how much there is
    is_full    nothing new is to be accepted

    `reliefs` are asked, one after the other, for the bytes that are too many; each returns how many it gives back.
    """

    def __init__(self, bytes_max: int = 0, resident: Callable[[], int] = resident_bytes) -> None:
        self.bytes_max = bytes_max
        self.is_full = False
        self.reliefs: list[Callable[[int], int]] = []
        self._resident = resident
        self._eased = asyncio.Event()
        self._trimmed = self._said = float("-inf")

    def refusal(self) -> UnavailableError:
        """Why nothing is accepted."""
        return UnavailableError(
            f"the gateway's process has nearly as much memory as it may have (--memory-max, {self.bytes_max} bytes): "
            "try again later"
        )

    async def eased(self) -> None:
        """Returns when it is not full."""
        while self.is_full:
            self._eased.clear()
            await self._eased.wait()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while self.bytes_max:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self, now: float) -> None:
        """One look. now: seconds, monotonic."""
        resident = self._resident()
        tight = int(self.bytes_max * TIGHT_PART)
        if resident > tight and now - self._trimmed >= TRIM_EVERY_S:
            # The allocator keeps what was freed in the middle of its heaps.
            self._trimmed = now
            trim()
            resident = self._resident()
        self.is_full = resident > self.bytes_max * FULL_PART
        if resident > tight:
            excess = resident - tight
            for relieve in self.reliefs:
                excess -= relieve(excess)
        if not self.is_full:
            self._eased.set()
        elif now - self._said >= SAY_EVERY_S:
            self._said = now
            logs.warning("memory is nearly full, requests are refused", resident=resident, memory_max=self.bytes_max)


def trim() -> None:
    """Gives memory that was freed back to the system, where the C library can."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
