"""A mesh of the user's. Faults hit only what the user has named. When a victim is back can only be guessed."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import click

from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import KINDS, PROCESSES, Act, Victim
from deploy.chaos.links import Links, gateway_link
from deploy.chaos.mesh import BACK_TIMEOUT_S, POLL_S, SIGNALS, NoVictimError, TargetMesh, strike_process
from deploy.chaos.proxy import HOST
from deploy.local.private_mesh import past_proxies
from deploy.local.readiness import NO_EXECUTOR, unreadiness
from shared.process.addresses import host_and_port
from shared.process.machine import is_running

SLOTS = 64
"""Slots that the fault `fill-slots` assumes: from outside their number is not known."""
RECOVERY_S = 15.0
"""How long a fault of a process explains errors, and longer while a gateway is not ready."""
MEETING_TIMEOUT_S = 30.0
"""How long to wait for a gateway that has never answered: it may be none, or be started beside this program."""
TELL_EVERY_S = 5.0
OUTSIDE = frozenset({Victim.CLIENT_LINKS, Victim.CLIENTS, Victim.SLOTS})
"""Victims that can be hit without knowing a process."""


@contextmanager
def given_mesh(
    gateways: Sequence[GatewayAddresses], pids: Mapping[Victim, list[int]], command: str
) -> Generator[GivenMesh]:
    """The mesh behind proxies, within the block. Arguments as for `GivenMesh`."""
    with Links() as links, past_proxies(HOST):
        proxied = [
            GatewayAddresses(
                links.listen(gateway_link(number, "http"), *host_and_port(one.http)) if one.http else "",
                links.listen(gateway_link(number, "grpc"), *host_and_port(one.grpc)) if one.grpc else "",
            )
            for number, one in enumerate(gateways)
        ]
        yield GivenMesh(links, gateways, proxied, pids, command)


def order_of(command: str, **values: str | int) -> list[str]:
    """The words of a command, with values in place of their names in braces. Raises ValueError, LookupError or
    AttributeError for what cannot be filled in."""
    return [part.format(**values) for part in shlex.split(command)]


class GivenMesh(TargetMesh):
    """The user's mesh.

    direct    addresses of the gateways themselves
    gateways  their addresses through the proxies
    pids      processes of this machine that may be struck, by service
    command   is run to strike a process of a service; {signal}, {service} and {number} are filled in
    """

    slots = SLOTS

    def __init__(
        self,
        links: Links,
        direct: Sequence[GatewayAddresses],
        gateways: Sequence[GatewayAddresses],
        pids: Mapping[Victim, list[int]],
        command: str,
    ) -> None:
        self.links = links
        self._direct = direct
        self.gateways = gateways
        self._pids = pids
        self._command = command
        self._struck = 0
        self._met = set[str]()
        victims = OUTSIDE | set(pids) | (set(PROCESSES) if command else set[Victim]())
        self.kinds = [kind.name for kind in KINDS.values() if kind.victim in victims]
        self.about = {"mesh": f"given: {len(gateways)} gateways", "redis": "the mesh's own"}

    def names(self, victim: Victim) -> Sequence[str]:
        """The process ids of a service, as text; its name when a command strikes it."""
        # What starts a process again gives it another id.
        if living := [str(pid) for pid in self._pids.get(victim, ()) if is_running(pid)]:
            return living
        if self._command:
            return [str(victim)]
        raise NoVictimError(f"no {victim} of --pids lives any more")

    async def strike(self, victim: Victim, name: str, act: Act, seconds: float) -> None:
        if name.isdigit():
            await strike_process(int(name), act, seconds)
        else:
            self._struck += 1
            await self._order(victim, SIGNALS[act].name)
            if act in (Act.FREEZE, Act.BLINK):
                try:
                    await asyncio.sleep(seconds)
                finally:
                    await self._order(victim, "SIGCONT")
        await asyncio.sleep(RECOVERY_S)
        await self.ready()

    async def _order(self, victim: Victim, signal_name: str) -> None:
        """Runs the user's command. Raises RuntimeError if it fails: a fault that does not happen proves nothing."""
        filled = order_of(
            self._command, signal=signal_name.removeprefix("SIG"), service=str(victim), number=self._struck
        )
        process = await asyncio.create_subprocess_exec(*filled)
        if code := await process.wait():
            raise RuntimeError(f"{shlex.join(filled)} ended with code {code}")

    async def ready(self) -> None:
        """Only the gateways are asked: the user's executors are not known."""
        for http in (gateway.http for gateway in self._direct if gateway.http):
            await self._wait_for(http)

    async def _wait_for(self, http: str) -> None:
        """Returns when a gateway is ready; tells meanwhile why it is not. Raises TimeoutError if it takes too long."""
        begun_s = told_s = time.monotonic()
        while reason := await unreadiness(*host_and_port(http)):
            if reason == NO_EXECUTOR:
                self._met.add(http)
            now_s, patience_s = time.monotonic(), BACK_TIMEOUT_S if http in self._met else MEETING_TIMEOUT_S
            if now_s - begun_s > patience_s:
                remedy = "" if http in self._met else ": start it, or give another --http"
                raise TimeoutError(f"the gateway {http}: {reason}, for {patience_s:.0f} s{remedy}")
            if now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                click.echo(f"the gateway {http}: {reason}", err=True)
            await asyncio.sleep(POLL_S)
        self._met.add(http)
