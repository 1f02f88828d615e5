"""A mesh under chaos: what clients use and faults hit. `own_mesh.py` has a private one, `given_mesh.py` a user's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import Act, Victim
from deploy.chaos.links import Links

BACK_TIMEOUT_S = 240.0
"""How long to wait until a process that was struck is back. On a busy machine executors load their models slowly."""
POLL_S = 0.1
SIGNALS = {Act.KILL: signal.SIGKILL, Act.RESTART: signal.SIGTERM, Act.FREEZE: signal.SIGSTOP, Act.BLINK: signal.SIGSTOP}


class NoVictimError(Exception):
    """There is no process of the service left that may be struck."""


class TargetMesh(ABC):
    """A mesh that clients use and faults hit.

    links     the proxies
    gateways  their addresses through the proxies
    slots     slots of `models.FILLED`, over all executors
    kinds     names of the faults that are possible in this mesh
    about     facts about the mesh for the report
    """

    links: Links
    gateways: Sequence[GatewayAddresses]
    slots: int
    kinds: Sequence[str]
    about: Mapping[str, str]

    @abstractmethod
    def names(self, victim: Victim) -> Sequence[str]:
        """The processes of a service that can be struck now. Raises NoVictimError if there are none."""

    @abstractmethod
    async def strike(self, victim: Victim, name: str, act: Act, seconds: float) -> None:
        """Carries a fault out on a process, and returns when the process is back."""

    @abstractmethod
    async def ready(self) -> None:
        """Returns when every process that was started serves."""

    async def refused_commits(self) -> int | None:
        """Commits that were refused by epoch so far; None if they cannot be counted."""
        return None


async def strike_process(pid: int, act: Act, seconds: float) -> None:
    """Sends a process the fault's signal. One that is frozen is woken also if this coroutine is cancelled."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[act])
        if SIGNALS[act] is signal.SIGSTOP:
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
