"""What chaos acts on, and how a process is struck. A private mesh is in `own_mesh.py`, a user's in `given_mesh.py`."""

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
"""How long is waited for a process that was struck; on a busy machine an executor loads its models for a while."""
POLL_S = 0.1
SIGNALS = {Act.KILL: signal.SIGKILL, Act.RESTART: signal.SIGTERM, Act.FREEZE: signal.SIGSTOP, Act.BLINK: signal.SIGSTOP}


class TargetMesh(Protocol):
    """Where the clients go, and what can be done to the processes.

    gateways  as the clients reach them: by way of the proxies
    slots     of `models.FILLED`, over all executors
    kinds     names of the faults that can be brought about here
    about     what the report says of it
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
        """Does it to a process, and returns when that is back."""
        ...

    async def ready(self) -> None:
        """Returns when everything that was started serves."""
        ...

    async def refused_commits(self) -> int | None:
        """Commits that were refused by epoch so far; None when nothing counts them."""
        ...


def send(pid: int, sent: signal.Signals) -> bool:
    """Sends a process a signal; False when it is gone."""
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        return False
    return True


async def frozen(pid: int, seconds: float) -> None:
    """Freezes a process for so long. It wakes also when this is cancelled."""
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
