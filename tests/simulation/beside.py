"""A second model beside the first, on the same executors, with another strategy, slots, instances and checkpoints.

An executor has one inbox, one lease and one committer for both. Each has a leader of its own, which takes sequences
from a lost executor when it gets to it. In every other mesh the first one is loaded anew and unloaded meanwhile, and
an operator pauses, moves and ends its sequences.

`python -m tests.simulation --beside --seeds 1000`
"""

from __future__ import annotations

import random
from dataclasses import replace

from shared.contract.errors import Code
from tests.simulation.clients import Asker, Client, Door, Habit
from tests.simulation.model import NAME, SECOND
from tests.simulation.reloading import ReloadedWorld
from tests.simulation.world import Result, World, plan_of, play


class TwoModels(World):
    """A mesh that serves both. Two loads may take longer than clients wait before they begin."""

    def _client(self, index: int, habit: Habit, doors: list[Door]) -> Client:
        client = super()._client(index, habit, doors)
        client.excused |= {Code.NOT_FOUND}
        return client

    def _asker(self, index: int, doors: list[Door]) -> Asker:
        asker = super()._asker(index, doors)
        asker.excused |= {Code.NOT_FOUND}
        return asker


class OneReloaded(TwoModels, ReloadedWorld):
    """A mesh whose operator acts on the first one."""


def two_models(seed: int) -> Result:
    """Runs one seed of such a mesh. Neither model is decoupled: a copy is told from its origin by its one answer."""
    plan, chance = plan_of(seed), random.Random(f"second model {seed}")
    shape = replace(plan.shape, decoupled=False)
    second = replace(
        shape,
        direct=not shape.direct,
        slots=chance.randint(1, 3),
        instances=chance.choice((1, 2)),
        interval=chance.choice((1, 3)),
        rows=0,
    )
    habits = [replace(habit, model=(NAME, SECOND)[index % 2]) for index, habit in enumerate(plan.habits)]
    plan = replace(plan, shape=replace(shape, second=second), habits=habits)
    return play(seed, plan, OneReloaded if seed % 2 else TwoModels)
