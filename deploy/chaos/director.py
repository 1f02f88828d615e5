"""Carries out a plan of faults: each when its share of the steps is answered and the faults before it are over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from deploy.chaos.faults import KINDS, Act, ChaosPlan, Fault, FaultKind, Victim
from deploy.chaos.history import Strike
from deploy.chaos.links import REDIS, gateway_link
from deploy.chaos.load import ClientLoad
from deploy.chaos.mesh import NoVictimError, TargetMesh
from deploy.chaos.scripts import ProtocolName, filler

POLL_S = 0.05
SETTLE_TIMEOUT_S = 60.0
DROPPED_SHARE = 0.5
FILLING = 2
"""The fault `fill-slots` starts this many times as many sequences as there are slots."""
SLOW_S = (0.005, 0.05)


@dataclass(eq=False)
class Director:
    """One run's faults.

    protocol  how slots are filled
    strikes   what was done so far; of what goes on, the end is infinite
    failures  faults that could not be carried out, or whose victim did not come back
    """

    mesh: TargetMesh
    load: ClientLoad
    plan: ChaosPlan
    protocol: ProtocolName
    strikes: list[Strike] = field(default_factory=list[Strike])
    failures: list[str] = field(default_factory=list[str])

    async def direct(self) -> None:
        """Carries out all faults, in order. Faults that are due together are carried out at the same time."""
        for at, group in itertools.groupby(self.plan.faults, lambda fault: fault.at):
            while self.load.score.answered < at * self.plan.steps:  # noqa: ASYNC110 -- an event per answer costs more
                await asyncio.sleep(POLL_S)
            async with asyncio.TaskGroup() as together:
                for fault in group:
                    together.create_task(self._strike(fault), name=fault.kind)
            await self._settle()

    async def _settle(self) -> None:
        """Waits for an answer, so that the next fault hits a mesh that works."""
        answered = self.load.score.answered
        deadline = self.load.clock.now() + SETTLE_TIMEOUT_S
        while self.load.score.answered == answered and self.load.clock.now() < deadline:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(POLL_S)

    async def _strike(self, fault: Fault) -> None:
        """Carries out one fault, and waits until its victim is back. Without a victim it is left out: then the run is
        not complete.
        """
        strike = Strike(fault.number, fault.kind, round(self.load.clock.now(), 3), float("inf"))
        self.strikes.append(strike)
        try:
            await self._carry_out(fault, KINDS[fault.kind], strike)
        except NoVictimError as none:
            self.strikes.remove(strike)
            click.echo(f"fault {fault.number + 1}/{len(self.plan.faults)} {fault.kind} left out: {none}", err=True)
            return
        except (TimeoutError, OSError, RuntimeError) as failure:
            self.failures.append(f"{fault.kind} {strike.note}: {failure}")
        finally:
            strike.end_s = round(self.load.clock.now(), 3)
        done = f"fault {fault.number + 1}/{len(self.plan.faults)} {fault.kind} {strike.note}"
        click.echo(f"{done}: {strike.end_s - strike.begin_s:.1f} s", err=True)

    async def _carry_out(self, fault: Fault, kind: FaultKind, strike: Strike) -> None:
        match kind.victim:
            case Victim.REDIS_LINKS:
                services = (Victim.GATEWAY, Victim.SCHEDULER, Victim.EXECUTOR)
                whose = "" if fault.all else pick(fault, [n for service in services for n in self.mesh.names(service)])
                strike.note = f"of {whose or 'all'}"
                await self._strike_links([REDIS], fault, kind.act, whose)
            case Victim.CLIENT_LINKS:
                number = fault.target % len(self.mesh.gateways)
                strike.note = f"gateway-{number + 1}"
                offered = {"http": self.mesh.gateways[number].http, "grpc": self.mesh.gateways[number].grpc}
                links = [gateway_link(number, protocol) for protocol, address in offered.items() if address]
                await self._strike_links(links, fault, kind.act, "")
            case Victim.CLIENTS:
                chance = random.Random(f"drop {self.plan.seed} {fault.number}")
                strike.note = f"{self.load.hang_up(DROPPED_SHARE, chance)} clients"
            case Victim.SLOTS:
                strike.note = f"{FILLING * self.mesh.slots} sequences"
                await self._fill(fault)
            case _:
                strike.note = pick(fault, self.mesh.names(kind.victim))
                await self.mesh.strike(kind.victim, strike.note, kind.act, fault.seconds)

    async def _strike_links(self, links: Sequence[str], fault: Fault, act: Act, whose: str) -> None:
        """Lets proxies misbehave for the fault's time. whose: beginning of the name of the service; "" for all."""

        async def call(method: str, *arguments: Any) -> None:
            await asyncio.gather(*(self.mesh.links.call(link, method, *arguments) for link in links))

        begin: tuple[Any, ...]
        end: tuple[Any, ...]
        match act:
            case Act.CUT:
                await call("cut", whose)
                return
            case Act.STRAND:
                begin, end = ("strand", whose), ("cut", whose)
            case Act.STALL:
                begin, end = ("hold", whose), ("release",)
            case _:
                begin = ("delay", random.Random(fault.target).uniform(*SLOW_S), whose)
                end = ("delay", 0.0, whose)
        await call(*begin)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await call(*end)

    async def _fill(self, fault: Fault) -> None:
        scripts = [filler(self.plan, fault, position, self.protocol) for position in range(FILLING * self.mesh.slots)]
        await asyncio.gather(*(self.load.play(script) for script in scripts))


def pick(fault: Fault, names: Sequence[str]) -> str:
    return names[fault.target % len(names)]
