"""The kinds of faults, and a run's plan of them. Pure: the same seed gives the same plan.

A fault is due when a certain share of the run's steps has been answered, not at a certain time. So the plan is the same
on machines of different speed. Now and then two faults are due together.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

PAIR_CHANCE = 0.2
"""Probability that a fault is due together with the one before it."""


class Act(StrEnum):
    """What a fault does to its victim."""

    KILL = "kill"
    RESTART = "restart"
    FREEZE = "freeze"
    BLINK = "blink"
    CUT = "cut"
    STRAND = "strand"
    STALL = "stall"
    SLOW = "slow"
    DROP = "drop"
    FILL = "fill"
    PROMOTE = "promote"
    LOSE = "lose"


class Victim(StrEnum):
    """What a fault hits. INSTANCE is the process of a model's instance; REDIS_LINKS and CLIENT_LINKS are connections
    through a proxy.
    """

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    INSTANCE = "instance"
    REDIS = "redis"
    REPLICA = "replica"
    NODE = "node"
    REDIS_LINKS = "redis-links"
    CLIENT_LINKS = "client-links"
    CLIENTS = "clients"
    SLOTS = "slots"


OF_REDIS = (Victim.REDIS, Victim.REPLICA, Victim.NODE)
PROCESSES = (Victim.GATEWAY, Victim.SCHEDULER, Victim.EXECUTOR, Victim.REDIS)


@dataclass(frozen=True, slots=True)
class FaultKind:
    act: Act
    victim: Victim
    meaning: str

    @property
    def name(self) -> str:
        return f"{self.act}-{self.victim}"


ACTS_ON_PROCESSES: Mapping[Act, str] = {
    Act.KILL: "SIGKILL",
    Act.RESTART: "SIGTERM",
    Act.FREEZE: "SIGSTOP for longer than the lease, then SIGCONT",
    Act.BLINK: "SIGSTOP for a part of the lease, then SIGCONT",
}
KINDS: Mapping[str, FaultKind] = {
    kind.name: kind
    for kind in (
        *(FaultKind(act, victim, meaning) for victim in PROCESSES for act, meaning in ACTS_ON_PROCESSES.items()),
        FaultKind(Act.KILL, Victim.INSTANCE, "SIGKILL for the process of a model's instance (instance_process)"),
        FaultKind(Act.FREEZE, Victim.INSTANCE, "SIGSTOP of such a process for longer than the lease, then SIGCONT"),
        FaultKind(Act.PROMOTE, Victim.REPLICA, "Redis' primary gets SIGKILL, and its replicas lack the last writes"),
        FaultKind(Act.LOSE, Victim.NODE, "a node of a Cluster gets SIGKILL with its replica, and both come back later"),
        FaultKind(Act.CUT, Victim.REDIS_LINKS, "connections of one or of all services to Redis get RST"),
        FaultKind(
            Act.STRAND, Victim.REDIS_LINKS, "connections of one or of all services to Redis go silent, then get RST"
        ),
        FaultKind(
            Act.STALL, Victim.REDIS_LINKS, "bytes between one or all services and Redis wait longer than the lease"
        ),
        FaultKind(Act.SLOW, Victim.REDIS_LINKS, "each piece of bytes to and from Redis takes 5 to 50 ms longer"),
        FaultKind(Act.CUT, Victim.CLIENT_LINKS, "connections of the clients to one gateway get RST"),
        FaultKind(Act.STALL, Victim.CLIENT_LINKS, "bytes between the clients and one gateway wait"),
        FaultKind(Act.DROP, Victim.CLIENTS, "half of the clients hang up, and come back through another gateway"),
        FaultKind(Act.FILL, Victim.SLOTS, "twice as many sequences as there are slots take them"),
    )
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan.

    at       the share of the run's steps that must have been answered before it, 0 to 1
    target   index of the victim, modulo the number of victims
    all      hit all victims instead (connections)
    seconds  how long the fault lasts, if it is of a kind that lasts
    """

    number: int
    kind: str
    at: float
    target: int
    all: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The plan of a run. run: its name, part of every correlation id."""

    seed: int
    steps: int
    faults: Sequence[Fault]
    minutes: float
    clients: int
    run: str


def plan_faults(seed: int, count: int, kinds: Sequence[str], *, lease_s: float) -> list[Fault]:
    """The faults of a run, in order. The numbers of any two kinds differ by one at most.

    lease_s  lease of executors and schedulers; some freezes are shorter than it, others longer
    """
    chance = random.Random(f"faults {seed}")
    order: list[str] = []
    while kinds and len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    faults: list[Fault] = []
    for number, kind in enumerate(order[:count]):
        paired = faults and chance.random() < PAIR_CHANCE
        faults.append(
            Fault(
                number,
                kind,
                at=faults[-1].at if paired else (number + 1) / (count + 1),
                target=chance.randrange(1 << 16),
                all=chance.random() < 0.5,
                seconds=round(lasting_s(chance, KINDS[kind].act, lease_s), 3),
            )
        )
    return faults


def lasting_s(chance: random.Random, act: Act, lease_s: float) -> float:
    match act:
        case Act.FREEZE | Act.STALL | Act.STRAND:
            return chance.uniform(1.3, 2.5) * lease_s
        case Act.LOSE:
            return chance.uniform(2.0, 4.0) * lease_s
        case Act.BLINK:
            return chance.uniform(0.1, 0.6) * lease_s
        case Act.SLOW | Act.FILL | Act.PROMOTE:
            return chance.uniform(1.0, 3.0)
        case _:
            return 0.0
