"""The interface of a mesh under chaos. `own_mesh.py` implements it for a private mesh, `given_mesh.py` for a user's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import Act, Victim
from deploy.chaos.links import Links

BACK_TIMEOUT_S = 240.0
"""How long to wait until a process that was struck is back. On a busy machine executors load their models slowly."""
POLL_S = 0.1
SIGNALS = {Act.KILL: signal.SIGKILL, Act.RESTART: signal.SIGTERM, Act.FREEZE: signal.SIGSTOP, Act.BLINK: signal.SIGSTOP}


class TargetMesh(Protocol):
    """A mesh that clients use and faults hit.

    gateways  their addresses through the proxies
    slots     slots of `models.FILLED`, over all executors
    kinds     names of the faults that are possible in this mesh
    about     facts about the mesh for the report
    """

    @property
    def links(self) -> Links: ...
    @property
    def gateways(self) -> Sequence[GatewayAddresses]: ...
    @property
    def slots(self) -> int: ...
    @property
    def kinds(self) -> Sequence[str]: ...
    @property
    def about(self) -> Mapping[str, str]: ...

    def names(self, victim: Victim) -> Sequence[str]:
        """The processes of a service."""
        ...

    async def strike(self, victim: Victim, name: str, act: Act, seconds: float) -> None:
        """Carries a fault out on a process, and returns when the process is back."""
        ...

    async def ready(self) -> None:
        """Returns when every process that was started serves."""
        ...

    async def refused_commits(self) -> int | None:
        """Commits that were refused by epoch so far; None if they cannot be counted."""
        ...


def send(pid: int, sent: signal.Signals) -> bool:
    """Sends a process a signal; False when it is gone."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return False
    return True


async def frozen(pid: int, seconds: float) -> None:
    """Freezes a process for so long. The process is woken also if this coroutine is cancelled."""
    try:
        if send(pid, signal.SIGSTOP):
            await asyncio.sleep(seconds)
    finally:
        send(pid, signal.SIGCONT)


async def until(condition: Callable[[], object], what: str) -> None:
    """Waits until the condition holds. Raises TimeoutError, saying what did not happen."""
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {BACK_TIMEOUT_S:.0f} s: this did not happen")
        await asyncio.sleep(POLL_S)
