"""Carries out a plan of faults: each when its share of the steps is answered and the faults before it are over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deploy.chaos.faults import KINDS, PROCESSES, Act, Fault, FaultKind, Victim
from deploy.chaos.history import Strike
from deploy.chaos.links import REDIS, gateway_link
from deploy.chaos.load import ClientLoad
from deploy.chaos.mesh import TargetMesh
from deploy.chaos.models import FILLED, variant
from deploy.chaos.scripts import ProtocolName, filler

POLL_S = 0.05
SETTLE_TIMEOUT_S = 60.0
DROPPED_SHARE = 0.5
FILLING = 2
"""The fault `fill-slots` starts this many times as many sequences as there are slots."""
SLOW_S = (0.005, 0.05)
PROTOCOLS = ("http", "grpc")
SERVICES = (Victim.GATEWAY, Victim.SCHEDULER, Victim.EXECUTOR)


@dataclass(eq=False)
class Director:
    """One run's faults.

    steps    of the run: faults are due at shares of it
    tell     called with a line for the user
    protocol how slots are filled
    strikes  what was done so far; of what goes on, the end is infinite
    failures  faults that could not be carried out, or whose victim did not come back
    """

    mesh: TargetMesh
    load: ClientLoad
    faults: Sequence[Fault]
    steps: int
    seed: int
    run: str
    protocol: ProtocolName
    tell: Callable[[str], None]
    strikes: list[Strike] = field(default_factory=list[Strike])
    failures: list[str] = field(default_factory=list[str])

    async def direct(self) -> None:
        """Carries out all faults, in order. Faults that are due together are carried out at the same time."""
        for at, group in itertools.groupby(self.faults, lambda fault: fault.at):
            while self.load.score.answered < at * self.steps:  # noqa: ASYNC110 -- an event per answer costs more
                await asyncio.sleep(POLL_S)
            async with asyncio.TaskGroup() as together:
                for fault in group:
                    together.create_task(self.strike(fault), name=fault.kind)
            await self._settle()

    async def _settle(self) -> None:
        """Waits for an answer, so that the next fault hits a mesh that works."""
        answered = self.load.score.answered
        deadline = self.load.clock.now() + SETTLE_TIMEOUT_S
        while self.load.score.answered == answered and self.load.clock.now() < deadline:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(POLL_S)

    async def strike(self, fault: Fault) -> None:
        """Carries out one fault, and waits until its victim is back."""
        strike = Strike(fault.number, fault.kind, round(self.load.clock.now(), 3), float("inf"))
        self.strikes.append(strike)
        try:
            await self._carry_out(fault, KINDS[fault.kind], strike)
        except (TimeoutError, OSError, RuntimeError) as failure:
            self.failures.append(f"{fault.kind} {strike.note}: {failure}")
        finally:
            strike.end_s = round(self.load.clock.now(), 3)
        self.tell(f"fault {fault.number + 1}/{len(self.faults)} {fault.kind} {strike.note}: {length(strike):.1f} s")

    async def _carry_out(self, fault: Fault, kind: FaultKind, strike: Strike) -> None:
        match kind.victim:
            case victim if victim in PROCESSES or victim is Victim.REPLICA:
                strike.note = pick(fault, self.mesh.names(victim))
                await self.mesh.strike(victim, strike.note, kind.act, fault.seconds)
            case Victim.REDIS_LINKS:
                whose = "" if fault.all else pick(fault, [n for service in SERVICES for n in self.mesh.names(service)])
                strike.note = f"of {whose or 'all'}"
                await self._strike_redis_links(fault, kind.act, whose)
            case Victim.CLIENT_LINKS:
                number = fault.target % len(self.mesh.gateways)
                strike.note = f"gateway-{number + 1}"
                await self._strike_client_links(fault, kind.act, number)
            case Victim.CLIENTS:
                chance = random.Random(f"drop {self.seed} {fault.number}")
                strike.note = f"{self.load.hang_up(DROPPED_SHARE, chance)} clients"
            case _:
                strike.note = f"{FILLING * self.mesh.slots} sequences"
                await self._fill(fault)

    async def _strike_redis_links(self, fault: Fault, act: Act, whose: str) -> None:
        call = self.mesh.links.call
        match act:
            case Act.CUT:
                await call(REDIS, "cut", whose)
            case Act.STRAND:
                await call(REDIS, "strand", whose)
                await asyncio.sleep(fault.seconds)
                await call(REDIS, "cut", whose)
            case Act.STALL:
                await call(REDIS, "hold", whose)
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    await call(REDIS, "release")
            case _:
                await call(REDIS, "delay", random.Random(fault.target).uniform(*SLOW_S), whose)
                try:
                    await asyncio.sleep(fault.seconds)
                finally:
                    await call(REDIS, "delay", 0.0, whose)

    async def _strike_client_links(self, fault: Fault, act: Act, gateway: int) -> None:
        names = [
            gateway_link(gateway, protocol) for protocol in PROTOCOLS if getattr(self.mesh.gateways[gateway], protocol)
        ]
        if act is Act.CUT:
            await asyncio.gather(*(self.mesh.links.call(name, "cut") for name in names))
            return
        await asyncio.gather(*(self.mesh.links.call(name, "hold") for name in names))
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await asyncio.gather(*(self.mesh.links.call(name, "release") for name in names))

    async def _fill(self, fault: Fault) -> None:
        scripts = [
            filler(
                self.seed,
                fault.number,
                position,
                variant(FILLED),
                run=self.run,
                hold_s=fault.seconds,
                protocol=self.protocol,
            )
            for position in range(FILLING * self.mesh.slots)
        ]
        await asyncio.gather(*(self.load.play(script) for script in scripts))


def pick(fault: Fault, names: Sequence[str]) -> str:
    """The fault's victim among those that there are."""
    return names[fault.target % len(names)]


def length(strike: Strike) -> float:
    """How long a fault and the recovery of its victim took, in seconds."""
    return strike.end_s - strike.begin_s
