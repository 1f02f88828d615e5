"""How long things take: whole meshes on virtual time, without weather, in which one thing goes wrong at a time.

A fault of ours that a slower fallback repairs gives right answers only: what was not said is found out at the next
tick, by the end of a blocking read, or when a lost executor is forgotten. Here every answer has a bound, and so has the
end of every idle sequence. What the bounds are made of is written beside them: virtual time passes for nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from tests.simulation.asking import AskingClient
from tests.simulation.clients import Door, Habit, Stream, Style, Take
from tests.simulation.network import Trouble
from tests.simulation.story import Story
from tests.simulation.world import LEASE_MS, TICK_MS, Member, Plan, Result, World, plan_of, play

LEASE_S, TICK_S = LEASE_MS / 1000, TICK_MS / 1000
COMPUTE_S = 0.01
HOPS_S = 0.15
"""Every message of a step, of its sequence's way into a slot and of the steps before it in its batch: each takes up to
2 ms, a run of the model 10 ms. Far less than a tick, which is the shortest of the fallbacks."""
SETTLED_S = 2.0
"""Between two faults, beside what the last one may take."""
TIMES = 2
GRACE = {"orphan_grace_microseconds": "1500000"}
"""The idle time of sequences that clients have left."""


@dataclass(frozen=True)
class Drill:
    """Something that goes wrong several times in a run.

    answer_s  in which every request is answered, whatever it needs: a slot, a new owner, a leader
    late_s    in which an idle sequence is over after its time
    crowd     clients for each slot; beyond 1 they have to take turns
    pause_s   of a client between two steps, on the average
    leaves    how often a client leaves its sequence open, and its connection closes; 0.0: they have none
    """

    fault: Callable[[World, random.Random], None]
    answer_s: float
    late_s: float
    crowd: float = 0.5
    pause_s: float = 0.2
    leaves: float = 0.0


def nothing(world: World, chance: random.Random) -> None:
    """All is well."""


def kill_executor(world: World, chance: random.Random) -> None:
    _one_of(world.executors, chance).kill()


def stop_executor(world: World, chance: random.Random) -> None:
    _stop(_one_of(world.executors, chance))


def kill_scheduler(world: World, chance: random.Random) -> None:
    _one_of(world.schedulers, chance).kill()


def stop_scheduler(world: World, chance: random.Random) -> None:
    _stop(_one_of(world.schedulers, chance))


def cut_connections(world: World, chance: random.Random) -> None:
    """All connections of a service break, and again when it has made new ones."""
    life = _one_of(world.members, chance).life
    assert life is not None
    world.network.break_all(life.process)
    asyncio.get_running_loop().call_later(0.1, partial(world.network.break_all, life.process))


DRILLS = {
    "nothing": Drill(nothing, HOPS_S, TICK_S + HOPS_S),
    "turns": Drill(nothing, HOPS_S, TICK_S + HOPS_S, crowd=2.0),
    # Hardly any sequence is ever between two steps: who holds a slot gives it up with the end of a step.
    "busy turns": Drill(nothing, HOPS_S, TICK_S + HOPS_S, crowd=2.0, pause_s=0.02),
    "left sequences": Drill(nothing, HOPS_S, TICK_S + HOPS_S, leaves=0.6),
    # Its lease ends, which the leader finds at its next tick.
    "killed executor": Drill(kill_executor, LEASE_S + TICK_S + HOPS_S, TICK_S + HOPS_S),
    "stopped executor": Drill(stop_executor, TICK_S + HOPS_S, TICK_S + HOPS_S),
    # A standby looks for leaders' ends with every tick; the new leader's first look at executors is its next one.
    "killed scheduler": Drill(kill_scheduler, LEASE_S + 2 * TICK_S + HOPS_S, LEASE_S + 2 * TICK_S + HOPS_S),
    "stopped scheduler": Drill(stop_scheduler, 2 * TICK_S + HOPS_S, 2 * TICK_S + HOPS_S),
    # Connections are made again after a back-off that is drawn, twice here.
    "cut connections": Drill(cut_connections, 2 * TICK_S + HOPS_S, 2 * TICK_S + HOPS_S),
}


class DrillPlan(Plan):
    """A run of the model always takes the same."""

    def compute_s(self, chance: random.Random) -> float:
        return COMPUTE_S


class TimedDoor:
    """A gateway's door, and how long its answers take."""

    def __init__(self, door: Door, story: Story, bound_s: float) -> None:
        self._door = door
        self._story = story
        self._bound_s = bound_s
        self.slowest_s = 0.0

    async def infer(self, calls: list[InferCall], take: Take) -> list[asyncio.Future[Answer]]:
        """See `Door`."""
        sent_s = asyncio.get_running_loop().time()
        answers = await self._door.infer(calls, take)
        for call, answer in zip(calls, answers, strict=True):
            answer.add_done_callback(partial(self._came, call, sent_s))
        return answers

    def stream(self) -> Stream:
        """See `Door`. What goes through it is not timed."""
        return self._door.stream()

    def _came(self, call: InferCall, sent_s: float, _: asyncio.Future[Answer]) -> None:
        took_s = asyncio.get_running_loop().time() - sent_s
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > self._bound_s:
            self._story.violate(f"sequence {call.correlation_id}: an answer took {took_s:.3f} s")


class DrillWorld(World):
    """A mesh in which one thing goes wrong, several times."""

    def __init__(self, drill: Drill, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._drill = drill
        self.ledger.late_s = drill.late_s
        if drill.leaves:
            self.client = AskingClient

    def doors(self) -> list[Door]:
        return [TimedDoor(door, self.story, self._drill.answer_s) for door in super().doors()]

    async def weather(self) -> None:
        """Faults, each when the last one is over."""
        chance = random.Random(f"drill {self.chance.random()}")
        for _ in range(TIMES):
            await asyncio.sleep(SETTLED_S + self._drill.answer_s + chance.random())
            self.story.tell(f"fault: {self._drill.fault.__name__}")
            self._drill.fault(self, chance)
        await asyncio.sleep(SETTLED_S + self._drill.answer_s)


def drilled(name: str, seed: int) -> Result:
    """Runs one seed of a drill."""
    drill = DRILLS[name]
    return play(seed, drill_plan(drill, seed), partial(DrillWorld, drill))


def drill_plan(drill: Drill, seed: int) -> Plan:
    """The seed's mesh, with two executors, so that one can be lost, and as many clients as the drill says."""
    drawn, chance = plan_of(seed), random.Random(f"drill {seed}")
    executors, takes_turns = 2, drill.crowd > 1
    shape = replace(
        drawn.shape,
        declared=True,
        decoupled=False,
        virtual=takes_turns,
        interval=1 if takes_turns else drawn.shape.interval,
        slots=1 if takes_turns else 2 * drawn.shape.slots,
        parameters=GRACE if drill.leaves else {},
    )
    # Who is lost takes its slots along: those of the others must be enough.
    clients = int(drill.crowd * (executors - (not takes_turns)) * shape.slots * shape.instances)
    # Where nobody gives up a slot, who leaves a sequence without its end keeps one from the others.
    leaves = drill.leaves or (0.1 if takes_turns else 0.0)
    habits = [
        Habit(chance.choice(list(Style)), window=chance.choice([1, 1, 3]), pause_s=drill.pause_s, leaves=leaves)
        for _ in range(clients)
    ]
    return DrillPlan(
        shape=shape,
        shards=drawn.shards,
        executors=executors,
        schedulers=2,
        gateways=drawn.gateways,
        habits=habits,
        slow=0.0,
        faults_s=0.0,
        fault_pause_s=0.0,
        trouble=Trouble(),
    )


def _one_of(members: list[Member], chance: random.Random) -> Member:
    return chance.choice([member for member in members if member.life is not None])


def _stop(member: Member) -> None:
    assert member.life is not None
    member.life.stop.request("SIGTERM")
