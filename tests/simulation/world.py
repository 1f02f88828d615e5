"""One run: a whole mesh on virtual time, its clients, and what goes wrong with them, all drawn from one seed.

Services are the real ones from their `serve` inwards (but for the gateway's ports). What is
simulated is what they stand on: time, the network, the store, the engine's thread, and the launcher that starts a
process again when it has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

from redis.asyncio import BlockingConnectionPool

import executor.service
import gateway.service
import scheduler.service
from executor.models.version_maker import LoadOptions
from executor.settings import ExecutorSettings
from gateway.parts import GatewayParts
from gateway.requests.infer_call import InferCall
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer, OnOpen, OpenRequest
from gateway.settings import GatewaySettings
from scheduler.settings import SchedulerSettings
from shared.contract.errors import MeshError, Reason
from shared.contract.model_config import ModelConfig
from shared.process import lifecycle, logs
from shared.process.lifecycle import Stop
from shared.store import reading
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.keyspace import Keyspace
from tests.simulation.clients import Asker, Client, Door, Habit, LostError, Style, Take
from tests.simulation.connections import Server, TwinConnection
from tests.simulation.ledger import Ledger
from tests.simulation.leftovers import leftovers
from tests.simulation.model import CHAIN, SECOND, ChancePace, FoldEngine, FoldRepository, Shape
from tests.simulation.network import Network, Trouble
from tests.simulation.store import Store
from tests.simulation.story import Story, StoryHandler
from tests.simulation.virtual import EPOCH_S, RUNNING, SimulatedProcess, VirtualThread, virtual_world

LEASE_MS = 3000
TICK_MS = 400
TOMBSTONE_S = 12
PREFIX = "sim"
URL = "redis://twin:6379/0"
FINISH_S = 240.0
"""After the last fault: every client has its answers within this time."""
STOP_PATIENCE_S = 10.0
SETTLED_S = 0.1
"""So long at most it takes until a gateway hears that a client has left."""
RHYTHMS_S = {
    "executor.lease.registration.COUNTS_INTERVAL_S": 5.0,
    "executor.lease.serving.CLAIM_INTERVAL_S": 10.0,
    "executor.lease.serving.READINESS_INTERVAL_S": 10.0,
    "executor.reporting.reports.REPORT_INTERVAL_S": 10.0,
    "gateway.models.catalog.REFRESH_S": 1.0,
    "shared.store.tenants.POLL_INTERVAL_S": 30.0,
    "shared.stored_settings.POLL_INTERVAL_S": 30.0,
}
"""Slower than in life: nothing here depends on them, and each beat costs a simulation time."""
JUMPS = 0.2
"""The share of meshes in which the clock of the store jumps ahead, as that of a machine that was suspended."""
VIRTUAL = 0.7
"""The share of meshes in which idle sequences give up their slots; in the others they keep them until their end."""


DECOUPLED = 0.25
"""The share of meshes whose model has any number of answers; they serve a stateless one, too."""
ASKERS = 2
"""Clients of that one."""


@dataclass(frozen=True)
class Plan:
    """What a seed means. slow: how many of the model's runs take seconds; cache_bytes: of the response cache."""

    shape: Shape
    shards: int
    executors: int
    schedulers: int
    gateways: int
    habits: list[Habit]
    slow: float
    faults_s: float
    fault_pause_s: float
    trouble: Trouble
    cache_bytes: int = 0

    def compute_s(self, chance: random.Random) -> float:
        """How long a run of the model takes."""
        return chance.uniform(0.5, LEASE_MS / 1000) if chance.random() < self.slow else chance.expovariate(50)


def plan_of(seed: int) -> Plan:
    """A mesh, its clients, and how rough the weather is."""
    chance = random.Random(f"plan {seed}")
    shape = Shape(
        slots=chance.randint(1, 3),
        instances=chance.choice([1, 1, 2]),
        direct=chance.random() < 0.3,
        interval=chance.choice([1, 1, 1, 3]),
        declared=chance.random() < 0.85,
        idle_s=chance.uniform(5.0, 9.0),
        # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
        virtual=random.Random(f"slots {seed}").random() < VIRTUAL,
        spare=random.Random(f"spare {seed}").choice([0, 1]),
        computes=random.Random(f"computes {seed}").random() < 0.5,
        journaled=random.Random(f"journal {seed}").random() < 0.5,
    )
    if not shape.direct or (shape.declared and shape.virtual):
        shape = replace(shape, rows=random.Random(f"rows {seed}").randint(1, shape.slots))
    # As above.
    if random.Random(f"parts {seed}").random() < DECOUPLED:
        shape = replace(shape, decoupled=True, computes=False)
    habits = [
        Habit(
            style=(style := chance.choice(list(Style))),
            window=chance.choice([1, 1, 3]),
            patience_s=chance.choice([None, 2.0, 6.0]) if style is not Style.PLAIN else None,
            pause_s=chance.choice([0.05, 0.2, 0.6]),
            cancels=chance.choice([0.0, 0.1]) if style is Style.PLAIN else 0.0,
        )
        for _ in range(chance.randint(3, 7))
    ]
    return Plan(
        shape=shape,
        shards=chance.choice([1, 2]),
        executors=chance.randint(1, 3),
        schedulers=chance.randint(1, 2),
        gateways=chance.randint(1, 2),
        habits=habits,
        slow=chance.choice([0.0, 0.02, 0.1, 0.3]),
        faults_s=chance.uniform(10.0, 20.0),
        fault_pause_s=chance.uniform(0.5, 2.5),
        trouble=chance.choice(
            [
                Trouble(),
                Trouble(request_lost=0.003, reply_lost=0.003),
                Trouble(request_lost=0.01, reply_lost=0.01, slow=0.02),
                Trouble(slow=0.05, slow_s=2.0),
            ]
        ),
    )


@dataclass(eq=False)
class Life:
    """One process, from its start to its end. open: answers that its callers wait for."""

    process: SimulatedProcess
    stop: Stop
    task: asyncio.Task[Any]
    parts: GatewayParts | None = None
    open: list[asyncio.Future[Answer]] = field(default_factory=list[asyncio.Future[Answer]])


class Member:
    """A place in the mesh: one process after another, as a launcher keeps it. wanted: whether it is started again."""

    def __init__(self, world: World, name: str, main: Callable[[Life], Awaitable[int]]) -> None:
        self.name = name
        self.wanted = True
        self.life: Life | None = None
        self._world = world
        self._main = main

    def start(self) -> None:
        """Starts a process, unless one is running."""
        if self.life is not None or not self.wanted:
            return
        self._world.story.tell(f"{self.name} starts")
        process = SimulatedProcess(self.name, self.kill)
        self.life = life = Life(process, Stop(), cast("Any", None))

        async def main() -> None:
            await self._main(life)

        life.task = process.start(main())
        life.task.add_done_callback(lambda _: self._ended(life), context=contextvars.Context())

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        life = self.life
        if life is not None:
            life.process.hold()
            self._world.network.heal(life.process)
            self._world.network.abandon(life.process)
            self._world.graves.append(life)
            self._over(life)

    def _ended(self, life: Life) -> None:
        if self.life is life:
            self._world.network.abandon(life.process)
            self._over(life)

    def _over(self, life: Life) -> None:
        self.life = None
        for answer in life.open:
            if not answer.done():
                answer.set_exception(LostError())
        asyncio.get_running_loop().call_later(self._world.chance.uniform(0.2, 1.5), self.start)


class WayBack:
    """One request's way from the gateway to its client: what is sent first arrives first."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._arrives_at = 0.0

    def send(self, arrive: Callable[..., None], *content: Any) -> None:
        loop = asyncio.get_running_loop()
        self._arrives_at = max(loop.time() + self._delay_s(), self._arrives_at + 1e-6)
        loop.call_at(self._arrives_at, arrive, *content, context=self._arriving())

    def _arriving(self) -> contextvars.Context:
        return contextvars.Context()


class WayThere(WayBack):
    """A client's way to a process of a gateway."""

    def __init__(self, delay_s: Callable[[], float], life: Life) -> None:
        super().__init__(delay_s)
        self._life = life

    def _arriving(self) -> contextvars.Context:
        return self._life.process.context


class GatewayDoor:
    """A gateway, as clients reach it over a network of their own that never fails."""

    def __init__(self, world: World, member: Member) -> None:
        self._world = world
        self._member = member

    async def infer(self, calls: list[InferCall], take: Take) -> list[asyncio.Future[Answer]]:
        """See `Door`."""
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in calls]
        life = self._life
        if life is None:
            await asyncio.sleep(self._world.network.delay_s())
            for answer in answers:
                answer.set_exception(LostError())
            return answers
        life.open = [answer for answer in life.open if not answer.done()] + answers
        self._way(life).send(self._enter, life, calls, answers, take)
        return answers

    def stream(self) -> GatewayStream:
        """See `Door`."""
        return GatewayStream(self._world, self._member)

    @property
    def _life(self) -> Life | None:
        return self._member.life

    def _way(self, life: Life) -> WayThere:
        return WayThere(self._world.network.delay_s, life)

    def _submit(self, parts: GatewayParts, call: InferCall, on_open: OnOpen) -> asyncio.Future[Answer]:
        return parts.inference.submit(call, None, on_open)

    def _enter(self, life: Life, calls: list[InferCall], answers: list[asyncio.Future[Answer]], take: Take) -> None:
        """Runs in the gateway."""
        for call, answer in zip(calls, answers, strict=True):
            if answer.done():
                continue
            if life.parts is None:
                answer.set_exception(LostError())
                continue
            way_back = WayBack(self._world.network.delay_s)
            inner = self._submit(life.parts, call, partial(self._opened, way_back, call, answer, take))
            inner.add_done_callback(partial(self._answer, way_back, answer))
            answer.add_done_callback(partial(self._left, life, inner))

    def _opened(
        self, way_back: WayBack, call: InferCall, answer: asyncio.Future[Answer], take: Take, pending: OpenRequest
    ) -> None:
        def arrive(content: Answer | MeshError) -> None:
            if not answer.done():
                take(call, content)

        if pending.is_many:
            pending.take = partial(way_back.send, arrive)

    def _answer(self, way_back: WayBack, answer: asyncio.Future[Answer], inner: asyncio.Future[Answer]) -> None:
        def arrive() -> None:
            if answer.done() or inner.cancelled():
                return
            if error := inner.exception():
                answer.set_exception(error)
            else:
                answer.set_result(inner.result())

        way_back.send(arrive)

    def _left(self, life: Life, inner: asyncio.Future[Answer], answer: asyncio.Future[Answer]) -> None:
        if answer.cancelled():
            delay_s = self._world.network.delay_s()
            asyncio.get_running_loop().call_later(delay_s, inner.cancel, context=life.process.context)


class GatewayStream(GatewayDoor):
    """A connection to one process of a gateway (a `Stream`), closed as `gateway.grpc.stream` does it."""

    def __init__(self, world: World, member: Member) -> None:
        super().__init__(world, member)
        self._process = member.life
        self._there = super()._way(member.life) if member.life else None
        self._known: ConnectionSequences | None = None
        self._open: list[asyncio.Future[Answer]] = []
        self._is_closed = False

    def close(self) -> None:
        """See `Stream`."""
        if self._there is not None and not self._is_closed:
            self._is_closed = True
            self._there.send(self._end)

    def _end(self) -> None:
        """Runs in the gateway. All that is open is cancelled in one turn."""
        for inner in self._open:
            inner.cancel()
        if self._known is not None:
            self._known.end()

    @property
    def _life(self) -> Life | None:
        return self._process if self._member.life is self._process else None

    def _way(self, life: Life) -> WayThere:
        assert self._there is not None, "its process lives"
        return self._there

    def _submit(self, parts: GatewayParts, call: InferCall, on_open: OnOpen) -> asyncio.Future[Answer]:
        self._known = self._known or parts.inference.connection()
        inner = parts.inference.submit(call, self._known, on_open)
        self._open = [*(one for one in self._open if not one.done()), inner]
        return inner

    def _left(self, life: Life, inner: asyncio.Future[Answer], answer: asyncio.Future[Answer]) -> None:
        if answer.cancelled():
            self.close()


class World:
    """The mesh of one seed. url: of its store; client: what its clients are"""

    url = URL
    client = Client

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        self.plan = plan
        self.story = story
        self.chance = random.Random(f"world {seed}")
        self.keys = Keyspace(PREFIX, self.plan.shards)
        shape = self.plan.shape
        self.ledger = Ledger(
            story,
            self.keys,
            idle_s=shape.idle_s,
            tombstone_s=TOMBSTONE_S,
            declared=shape.survives,
            paged=shape.declared and shape.virtual,
        )
        self.store = Store(self._store_us, random.Random(f"store {seed}"), self.ledger.run)
        self.ledger.store, self.ledger.journaled = self.store, shape.journaled
        self.network = Network(self._servers(), random.Random(f"network {seed}"))
        self.graves: list[Life] = []
        self.executors = [Member(self, f"e{n + 1}", self._executor(f"e{n + 1}")) for n in range(self.plan.executors)]
        self.schedulers = [Member(self, f"s{n + 1}", self._scheduler(f"s{n + 1}")) for n in range(self.plan.schedulers)]
        self.gateways = [Member(self, f"g{n + 1}", self._gateway(f"g{n + 1}")) for n in range(self.plan.gateways)]
        self.clients: list[Client | Asker] = []
        self.patches = ExitStack()
        """What a kind of mesh puts in the place of parts of services, until the last process is buried."""
        self._calm = False
        # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
        self._clock = random.Random(f"clock {seed}")
        self._jumps, self._ahead_s = self._clock.random() < JUMPS, 0.0

    @property
    def members(self) -> list[Member]:
        """Every place in the mesh."""
        return [*self.executors, *self.schedulers, *self.gateways]

    def shape_of(self, _content: str) -> Shape:
        """How the mesh serves a load of the model with that content."""
        return self.plan.shape

    def engine(self, shape: Shape, name: str) -> FoldEngine:
        """An instance of a model."""
        return FoldEngine(only_computes=shape.computes, grows=shape.grows, late=shape.late and not shape.in_order)

    def _servers(self) -> Mapping[str, Server]:
        return {"": Server(self.store, later)}

    def _store_us(self) -> int:
        return int((EPOCH_S + asyncio.get_running_loop().time() + self._ahead_s) * 1e6)

    # -- processes --------------------------------------------------------------------------------------------------

    def _executor(self, name: str) -> Callable[[Life], Awaitable[int]]:
        def main(life: Life) -> Awaitable[int]:
            return lifecycle.outcome(partial(executor.service.serve, self._executor_settings(name)), life.stop)

        return main

    def _executor_settings(self, name: str) -> ExecutorSettings:
        return ExecutorSettings(models=(Path(),), lease_ms=LEASE_MS, **self._common(name))

    def _scheduler(self, name: str) -> Callable[[Life], Awaitable[int]]:
        def main(life: Life) -> Awaitable[int]:
            common = self._common(name)
            settings = SchedulerSettings(lease_ms=LEASE_MS, tick_ms=TICK_MS, check_invariants=True, **common)
            return lifecycle.outcome(partial(scheduler.service.serve, settings), life.stop)

        return main

    def _gateway(self, name: str) -> Callable[[Life], Awaitable[int]]:
        def main(life: Life) -> Awaitable[int]:
            cache = f"local,size={self.plan.cache_bytes}" if self.plan.shape.cached else ""
            settings = GatewaySettings(cache_config=cache, **self._common(name))
            return lifecycle.outcome(partial(gateway.service.serve, settings), life.stop)

        return main

    async def serve_ports(self, settings: GatewaySettings, parts: GatewayParts, *_: object) -> None:
        """In the place of `gateway.service._serve_ports`: clients come in by a `GatewayDoor`."""
        loop = asyncio.get_running_loop()
        (life,) = [member.life for member in self.gateways if member.life and member.life.process is RUNNING.get()]
        life.parts = parts
        await life.stop.wait()
        life.parts = None
        parts.inference.stopping = True
        deadline = loop.time() + STOP_PATIENCE_S
        while parts.inference.in_flight and loop.time() < deadline:
            await asyncio.sleep(0.05)
        parts.inference.give_up("the gateway has stopped")

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "redis_url": self.url,
            "key_prefix": PREFIX,
            "shards": len(self.keys.shards),
            "name": name,
            "tombstone_seconds": TOMBSTONE_S,
        }

    # -- a run ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Everything, from the first start to the last check."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        for member in self.members:
            member.start()
        # A load takes as long as a run of the model may; then gateways hear of it.
        await asyncio.sleep(LEASE_MS / 1000 + 2.0)
        doors = self.doors()
        self.clients = [self._client(index, habit, doors) for index, habit in enumerate(self.plan.habits, 1)]
        if self.plan.shape.has_stateless:
            self.clients += [self._asker(len(self.clients) + 1 + index, doors) for index in range(ASKERS)]
        running = [asyncio.ensure_future(client.run()) for client in self.clients]
        await self.weather()
        self._calm = True
        _, late = await asyncio.wait(running, timeout=FINISH_S)
        for task in running:
            if task in late:
                task.cancel()
            elif error := task.exception():
                raise error
        for client in self.clients:
            if client.doing != "nothing":
                self.story.violate(f"client {client.index} has no answer: {client.doing}")
        if not self.story.violations:
            await self._clear_up()

    def doors(self) -> list[Door]:
        """The ways into the mesh."""
        return [GatewayDoor(self, member) for member in self.gateways]

    def _client(self, index: int, habit: Habit, doors: list[Door]) -> Client:
        client = self.client(
            index,
            habit,
            doors,
            random.Random(f"client {index} {self.chance.random()}"),
            self.story,
            self.ledger,
            idle_s=self.plan.shape.idle_s,
            decoupled=self.plan.shape.of(SECOND if habit.model == CHAIN else habit.model).decoupled,
            is_over=lambda: self._calm,
        )
        if self._jumps:
            # What a gateway knows of the clock may be some seconds old.
            client.excused |= {Reason.LATE}
        return client

    def _asker(self, index: int, doors: list[Door]) -> Asker:
        chance = random.Random(f"asker {index} {self.chance.random()}")
        shape = self.plan.shape
        return Asker(index, doors, chance, self.story, shape, is_over=lambda: self._calm)

    async def _clear_up(self) -> None:
        """Of the clients' requests nothing is left; after the idle time, nothing but what is meant to stay."""
        await self._settle()
        for member in self._dispensable():
            member.wanted = False
            if member.life is not None:
                member.life.stop.request("the end")
        problems: list[str] = []
        for _ in self.clients:
            await asyncio.sleep(self.plan.shape.idle_s + 3 * LEASE_MS / 1000 + TOMBSTONE_S + 2)
            # Sequences that were left in the line end one after the other where there is one slot.
            if not (problems := leftovers(self.store)):
                break
        for problem in problems:
            self.story.violate(problem)

    async def _settle(self) -> None:
        """Waits until gateways have heard that the clients have left. Calls of models go on without them."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (FINISH_S if self.ledger.calls else SETTLED_S)
        await asyncio.sleep(SETTLED_S)
        while left := self._in_flight():
            if loop.time() >= until_s:
                self.story.violate(f"gateways have requests in flight, and bytes of them: {left}")
                return
            await asyncio.sleep(SETTLED_S)

    def _in_flight(self) -> list[tuple[int, int]]:
        """Of each gateway that has any: its requests, and their bytes."""
        parts = [member.life.parts for member in self.gateways if member.life and member.life.parts]
        taken = [(one.inference.in_flight, one.inference.budget.taken) for one in parts]
        return [each for each in taken if any(each)]

    def _dispensable(self) -> list[Member]:
        """Who is not needed any more when every client has left."""
        return [*self.gateways, *self.executors[1:], *self.schedulers[1:]]

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:
            self.story.violate(f"a callback failed: {context['exception']!r}")

    # -- weather ----------------------------------------------------------------------------------------------------

    async def weather(self) -> None:
        """Faults for a while; then everything heals."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.plan.faults_s
        self.network.trouble = self.plan.trouble
        while loop.time() < end and not self.story.violations:
            await asyncio.sleep(self.chance.expovariate(1 / self.plan.fault_pause_s))
            self._fault()
            if self._jumps and self._clock.random() < 0.2:
                seconds = self._clock.choice([0.05, 0.05, 1.0, LEASE_MS / 1000, TOMBSTONE_S + 1, 36_000.0])
                self.story.tell(f"fault: the clock of the store jumps ahead by {seconds} s")
                self._ahead_s += seconds
        self.story.tell("the weather is fine from here on")
        self.network.trouble = Trouble()
        for member in self.members:
            if member.life is not None:
                self._wake(member, member.life)
                self._heal(member, member.life)

    def _fault(self) -> None:
        chance = self.chance
        member = chance.choice([*self.executors, *self.executors, *self.members])
        if chance.random() < 0.08:
            self.story.tell("fault: the store restarts")
            self.network.stop()
            self.store.restart()
            asyncio.get_running_loop().call_later(chance.uniform(0.0, 3.0), self._store_is_up)
            return
        if member.life is None:
            return
        fault = chance.choice([self._kill, self._freeze, self._freeze, self._cut, self._cut, self._break, self._stop])
        fault(member, member.life)

    def _store_is_up(self) -> None:
        self.story.tell("the store is up again")
        for server in self.network.servers.values():
            server.is_up = True

    def _kill(self, member: Member, life: Life) -> None:
        self.story.tell(f"fault: {member.name} is killed")
        member.kill()

    def _stop(self, member: Member, life: Life) -> None:
        self.story.tell(f"fault: {member.name} is told to stop")
        life.stop.request("SIGTERM")

    def _break(self, member: Member, life: Life) -> None:
        self.story.tell(f"fault: {member.name} loses its connections")
        self.network.break_all(life.process)

    def _freeze(self, member: Member, life: Life) -> None:
        seconds = self._duration_s()
        self.story.tell(f"fault: {member.name} is frozen for {seconds:.2f} s")
        life.process.hold()
        asyncio.get_running_loop().call_later(seconds, self._wake, member, life)

    def _wake(self, member: Member, life: Life) -> None:
        if member.life is life and life.process.held:
            self.story.tell(f"{member.name} wakes")
            life.process.release()

    def _cut(self, member: Member, life: Life) -> None:
        seconds = self._duration_s()
        self.story.tell(f"fault: {member.name} is cut off for {seconds:.2f} s")
        self.network.isolate(life.process)
        asyncio.get_running_loop().call_later(seconds, self._heal, member, life)

    def _heal(self, member: Member, life: Life) -> None:
        if member.life is life and life.process in self.network.cut:
            self.story.tell(f"{member.name} is reached again")
            self.network.heal(life.process)

    def _duration_s(self) -> float:
        """Often just about a lease."""
        return self.chance.choice([0.3, 1.0, LEASE_MS / 1000, 1.3 * LEASE_MS / 1000, 2.5 * LEASE_MS / 1000]) * (
            self.chance.uniform(0.8, 1.2)
        )


def later(seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(seconds, callback).cancel


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    seed: int
    violations: list[str]
    lines: list[str]
    digest: str
    events: int
    answers: int
    steps: int
    virtual_s: float


def simulate(seed: int) -> Result:
    """Runs one seed."""
    return play(seed, plan_of(seed), World)


def simulate_answers(seed: int) -> Result:
    """Runs one seed with a decoupled model, in weather in which answers come again: links break, executors are lost
    often, and every client asks again."""
    plan = plan_of(seed)
    habits = [
        replace(
            habit,
            style=Style.NUMBERED if habit.style is Style.PLAIN else habit.style,
            patience_s=habit.patience_s or 2.0,
            cancels=0.0,
        )
        for habit in plan.habits
    ]
    rough = replace(
        plan,
        shape=replace(plan.shape, decoupled=True, computes=False),
        executors=max(2, plan.executors),
        habits=habits,
        fault_pause_s=0.7,
        trouble=Trouble(request_lost=0.01, reply_lost=0.01, slow=0.02),
    )
    return play(seed, rough, World)


def play(seed: int, plan: Plan, make: Callable[[int, Story, Plan], World]) -> Result:
    """Runs a mesh from its first start to the last check."""
    story = Story()
    # What other tests of this process have left to be told to Redis would be told in this world.
    reading.found.counts.clear()
    # As of tasks (virtual.py).
    TwinConnection.numbers = itertools.count(1)
    # The collector runs when memory says so, and ends what it finds: not while every event counts.
    gc.disable()
    try:
        with virtual_world(seed, compute_s=plan.compute_s) as runner, told_to(story):
            world = runner.run(_run(lambda: make(seed, story, plan)))
            virtual_s = runner.get_loop().time()
    finally:
        gc.enable()
    answers = sum(client.answered for client in world.clients)
    lines = list(story.lines)
    return Result(seed, story.violations, lines, story.digest, story.events, answers, world.ledger.steps, virtual_s)


async def _run(make: Callable[[], World]) -> World:
    world = make()

    def pool(connections: int, wait_s: float, *, connection_class: object, **options: Any) -> BlockingConnectionPool:
        # Where the server is, and how its socket is made, means nothing here. Without `socket_timeout` redis-py would
        # take its default and write within `asyncio.wait_for`, which swallows cancellations.
        names = ("client_name", "redis_connect_func", "retry", "retry_on_error", "socket_timeout")
        kept = {name: options[name] for name in names}
        *_, home = options["redis_connect_func"].args
        made: Any = BlockingConnectionPool(
            connections,
            wait_s,
            connection_class=TwinConnection,
            dial=world.network.dialler(home),
            discovery=Mock(found=(home, 1)),
            driver_info=None,
            protocol=2,
            **kept,
        )
        return made

    def repository(_sources: Any, _devices: Any, options: LoadOptions) -> FoldRepository:
        return FoldRepository(world.shape_of, world.engine, options)

    def spare_slots(config: ModelConfig, _: int) -> int:
        return world.plan.shape.spare if config.pageable else 0

    with (
        world.patches,
        patch("shared.store.connections.redis_client.BlockingConnectionPool", pool),
        world.ledger.watching(),
        patch("executor.service.ModelRepository", repository),
        patch("executor.sequences.sequence_model.spare_slots", spare_slots),
        # What it finds is another thing in each process, and its end would be an event here.
        patch("shared.process.collector.gc", Mock()),
        patch("executor.models.loader.EngineThread", VirtualThread),
        # States that grow have a few numbers here, and several parts all the same.
        patch("shared.contract.state_fields.PART_BYTES", 16),
        patch("executor.workers.worker.EngineThread", VirtualThread),
        patch("executor.workers.worker.Pace", ChancePace),
        patch("gateway.service._opened", nullcontext),
        patch("gateway.service._serve_ports", world.serve_ports),
    ):
        await world.run()
        await _bury(world)
    return world


async def _bury(world: World) -> None:
    """Ends what is left of every process, so that nothing of it is collected half way. It counts no more."""
    world.network.stop()
    level = logs.LOGGER.level
    logs.LOGGER.setLevel(logs.Level.NOTICE + 1)
    lives = [*world.graves, *(member.life for member in world.members if member.life is not None)]
    for member in world.members:
        member.wanted = False
    for life in lives:
        life.process.killed = None
        life.process.release()
    for _ in range(5):
        # Whatever it was about to begin is begun: a coroutine that never was complains.
        await asyncio.sleep(0)
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await lifecycle.end(sorted(others, key=hash))
    logs.LOGGER.setLevel(level)


@contextmanager
def told_to(story: Story) -> Generator[None]:
    """Log lines go into the story; rhythms that matter to nobody here are slower."""
    handler = StoryHandler(story, (*CONNECTION_LOST, TimeoutError))
    before = logs.LOGGER.level, logs.LOGGER.propagate
    logs.LOGGER.addHandler(handler)
    logs.LOGGER.setLevel(logging.INFO)
    logs.LOGGER.propagate = False
    try:
        with ExitStack() as stack:
            for place, seconds in RHYTHMS_S.items():
                stack.enter_context(patch(place, seconds))
            yield
    finally:
        logs.LOGGER.removeHandler(handler)
        logs.LOGGER.setLevel(before[0])
        logs.LOGGER.propagate = before[1]
