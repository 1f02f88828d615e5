"""Bounds the memory of this process: watches its size.

Memory that can be counted has a share of the bound (`GatewaySettings.bounded`): bytes of requests
(`gateway.bounds.byte_budget`) and unread answers (`gateway.bounds.unread_answers`). Other memory cannot be counted:
bytes that a transport has not delivered yet, what decoding takes for a moment, what the allocator keeps. So the size of
the process is read many times a second. Beyond TIGHT_PART of the bound, the `reliefs` are asked to give memory back.
Beyond FULL_PART, no request is accepted until the process is smaller.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from shared.contract.errors import UnavailableError
from shared.process import logs
from shared.process.machine import read_text

LOOK_EVERY_S = 0.05
"""Pause between two looks at the process's size. A client on the same machine sends some tens of MiB in this time."""
TIGHT_PART = 0.65
FULL_PART = 0.8
"""Parts of the bound. The rest is for requests that are being decoded and bytes that arrive until the next look."""
TRIM_EVERY_S = 1.0
SAY_EVERY_S = 10.0
STATM = Path("/proc/self/statm")
LITTLE_BYTES = 16 << 10
"""A call or connection that keeps less than this is left alone when memory is short: its share of the bound allows for
it (`gateway.settings.RPC_BYTES`)."""

KeeperT = TypeVar("KeeperT")


def resident_bytes() -> int:
    """The resident size of this process; 0 where the system does not say."""
    words = read_text(STATM).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


class MemoryBound:
    """Compares the size of this process with a bound.

    bytes_max  0: no bound
    resident   reads the size of the process
    is_full    while it is True, no request is to be accepted
    reliefs    functions that give memory back. Each is called with the bytes that are too many, and returns how many it
               gives back
    """

    def __init__(self, bytes_max: int = 0, resident: Callable[[], int] = resident_bytes) -> None:
        self.bytes_max = bytes_max
        self.is_full = False
        self.reliefs: list[Callable[[int], int]] = []
        self._resident = resident
        self._eased = asyncio.Event()
        self._trimmed = self._said = float("-inf")

    def refusal(self) -> UnavailableError:
        """The error of a request that is refused because memory is full."""
        return UnavailableError(
            f"the gateway's process has nearly as much memory as it may have (--memory-max, {self.bytes_max} bytes): "
            "try again later"
        )

    async def eased(self) -> None:
        """Returns when memory is not full."""
        while self.is_full:
            self._eased.clear()
            await self._eased.wait()

    async def run(self) -> None:
        while self.bytes_max:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self, now: float) -> None:
        """Reads the size once and acts on it. now: seconds, monotonic."""
        resident = self._resident()
        tight = int(self.bytes_max * TIGHT_PART)
        if resident > tight and now - self._trimmed >= TRIM_EVERY_S:
            # The allocator keeps freed memory in the middle of its heaps. Trimming may make the process small enough
            # without taking anything from a client.
            self._trimmed = now
            if resident > self.bytes_max * FULL_PART:
                # The collector looks when many new objects are there. Of requests that are refused none stays, so what
                # is in cycles would keep the process full for ever.
                gc.collect()
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


def largest(sizes: Mapping[KeeperT, int], excess: int) -> list[KeeperT]:
    """Those that keep most, as many as keep so many bytes together; none that keeps less than LITTLE_BYTES."""
    chosen: list[KeeperT] = []
    for keeper in sorted(sizes, key=lambda keeper: -sizes[keeper]):
        if excess <= 0 or sizes[keeper] < LITTLE_BYTES:
            break
        chosen.append(keeper)
        excess -= sizes[keeper]
    return chosen


def trim() -> None:
    """Gives freed memory back to the system, where the C library can."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
