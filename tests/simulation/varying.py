"""What the other kinds of worlds leave out, beside loads, faults, and what an operator does.

    clients   begin anew in the midst of a sequence, and again under the id of the last one; a START may fail; each asks
              for a tenant, who may have few sequences
    inputs    that end every executor that runs them: no other sequence is given up with theirs. Some meshes have one
              executor, and one client with many such inputs beside clients with none: only so do neighbours of such a
              sequence lose every owner with it. Of several such clients a neighbour may be given up
              (docs/guides/promises.md)
    models    whose states are made anew by a takeover from the steps since START, and decoupled ones; a load with
              another content has other slots, instances and checkpoints. Iterative ones, whose passes begin anew where
              they are taken over, and whose callers leave between two of them; states that grow, and shrink; answers
              that come behind their batches. Beside it one without a state whose answers may come from the cache, or
              leave in the order of arrival, and which is loaded and unloaded, too
    times     steps with a timeout, stateless requests with one of their model's; batches that wait for more rows, and
              answers in the order of their steps
    operator  drains executors

`python -m tests.simulation --vary --seeds 1000`
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from shared.contract.tenants import TenantLimits
from shared.store.membership import Membership
from shared.store.sequence_status import SequenceStatus
from shared.store.sequences import Sequences
from tests.simulation.clients import Style
from tests.simulation.model import Shape, content_of
from tests.simulation.operator import Verb
from tests.simulation.reloading import ReloadedWorld
from tests.simulation.story import Story
from tests.simulation.world import Plan, Result, World, plan_of, play

TENANTS = {"few": TenantLimits(live_max=2), "many": TenantLimits(share=3)}
DEADLY = 0.01
ITERATIVE, LEAVES = 0.25, 0.2
"""The share of meshes whose model is iterative, and how often a plain client of these leaves."""
LATE, WITHOUT_STATE, CACHED = 0.4, 0.5, 0.4
"""The shares of meshes with late answers, and with a model without a state; and of those with its answers cached."""
CACHE_BYTES = 400, 1_000_000
"""Of the cache: for a few answers, or for all."""
DEADLY_BESIDE, BESIDE = 0.1, 0.25
"""The share of inputs that end an executor, of one client of so many meshes."""


class TenantsWorld(World):
    """A mesh whose tenants have limits."""

    tenants = TENANTS

    async def run(self) -> None:
        for name, limits in self.tenants.items():
            self.store.execute([b"HSET", self.keys.tenants.encode(), name.encode(), msgspec.json.encode(limits)])
        await super().run()


class VariedWorld(TenantsWorld, ReloadedWorld):
    """A mesh with all of this."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._seed = seed

    def shape_of(self, content: str) -> Shape:
        """The first load has the plan's shape."""
        shape, chance = self.plan.shape, random.Random(f"{content} of {self._seed}")
        if content == content_of(0):
            return shape
        slots, instances, interval = chance.randint(1, 3), chance.choice((1, 1, 2)), chance.choice((1, 3))
        return replace(shape, slots=slots, instances=instances, interval=interval, rows=0)

    def _verbs(self) -> list[Verb]:
        verbs = [*super()._verbs(), self._drain, self._undrain]
        # A copy is told from its origin by its one answer. One of an iterative model is over, or has no step yet.
        is_copied = not (self.plan.shape.decoupled or self.plan.shape.iterative)
        return verbs if is_copied else [verb for verb in verbs if verb != self._copy]

    async def _do_something(self, sequences: Sequences) -> None:
        if self._calm:
            await self._undrain()
        await super()._do_something(sequences)

    async def _drain(self, *_: Sequences | SequenceStatus) -> None:
        name = self._whims.choice(self.executors).name
        self.story.tell(f"the operator drains {name}")
        await Membership(self._redis, self.keys).drain(name, self.store.now_ms())

    async def _undrain(self, *_: Sequences | SequenceStatus) -> None:
        for name in await Membership(self._redis, self.keys).drained():
            self.story.tell(f"the operator drains {name} no more")
            await Membership(self._redis, self.keys).undrain(name)


def varied_plan(seed: int) -> Plan:
    """What a seed means for such a mesh."""
    plan, chance = plan_of(seed), random.Random(f"vary {seed}")
    shape = plan.shape
    if chance.random() < 0.3:
        shape = replace(shape, declared=False, log_steps=chance.choice((3, 1000)), rows=0)
    deadly = chance.choice((0.0, 0.0, DEADLY))
    habits = [
        replace(habit, bold=True, deadly=deadly, tenant=chance.choice(("", "few", "many"))) for habit in plan.habits
    ]
    # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
    if random.Random(f"beside {seed}").random() < BESIDE:
        habits = [replace(habit, deadly=(index == 1) * DEADLY_BESIDE) for index, habit in enumerate(habits)]
        plan = replace(plan, executors=1)
    chance = random.Random(f"model {seed}")
    shape = replace(
        shape,
        iterative=chance.random() < ITERATIVE,
        grows=shape.declared and chance.random() < 0.5,
        delay_us=(delay_us := chance.choice((0, 0, 50_000, 300_000))),
        in_order=chance.random() < 0.3,
        # Else a request never comes into a batch.
        patience_us=chance.choice((0, delay_us + 20_000, delay_us + 200_000)),
    )
    habits = [replace(habit, hurries=chance.choice((0.0, 0.5))) for habit in habits]
    # As above.
    chance = random.Random(f"stateless {seed}")
    if not shape.decoupled:
        late, stateless, cached = (chance.random() < share for share in (LATE, WITHOUT_STATE, CACHED))
        shape = replace(shape, late=late and not shape.iterative, stateless=stateless, cached=stateless and cached)
        plan = replace(plan, cache_bytes=chance.choice(CACHE_BYTES))
    if shape.iterative:
        habits = [replace(one, iterative=True, cancels=LEAVES if one.style is Style.PLAIN else 0.0) for one in habits]
    return replace(plan, shape=shape, habits=habits)


def varied(seed: int) -> Result:
    """Runs one seed of such a mesh."""
    return play(seed, varied_plan(seed), VariedWorld)
