"""An ensemble of two models with states, beside clients of each model, and clients that spread their steps.

Gateways drive the steps of an ensemble: one is killed between the two states, a client asks for a step again through
another one, and both states are at the same step all the same. Some clients send each step through another gateway, and
some steps through several at once: in some meshes more of these than may wait for one step, and the oldest gives way.

Some ensembles have a model without a state before, between or behind the two, and in some the second model is
decoupled: a client gets all answers of a step then, and what stands behind runs for each of them.

`python -m tests.simulation --chain --seeds 1000`
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

from shared.contract.limits import JOINED_MAX
from tests.simulation.beside import TwoModels
from tests.simulation.clients import Habit, Style
from tests.simulation.model import CHAIN, NAME, SECOND, STATELESS
from tests.simulation.story import Story
from tests.simulation.world import Plan, Result, plan_of, play

CHAINS = (NAME, SECOND), (NAME, SECOND), (STATELESS, NAME, SECOND), (NAME, STATELESS, SECOND), (NAME, SECOND, STATELESS)
MANY_ANSWERS, CROWDED = 0.4, 0.5
"""The shares of meshes whose second model is decoupled, and in which one caller alone may wait beside the first."""


class ChainWorld(TwoModels):
    """A mesh with the ensemble."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._joined_max = 1 if any(habit.copies > 2 for habit in plan.habits) else JOINED_MAX

    async def run(self) -> None:
        with patch("shared.store.scripts.JOINED_MAX", self._joined_max):
            await super().run()


def chain_plan(seed: int) -> Plan:
    """What a seed means for such a mesh. What fails in a model ends a sequence of the ensemble, so no input does. The
    first model is not decoupled: in an ensemble only its last step with a state may be.
    """
    plan, chance = plan_of(seed), random.Random(f"chain {seed}")
    shape = replace(plan.shape, decoupled=False, declared=True)
    second = replace(shape, slots=chance.randint(1, 3), instances=chance.choice((1, 2)), interval=1, rows=0)
    habits = [
        replace(spread(habit, chance), model=model, fails=0.0)
        for habit, model in zip(plan.habits, [CHAIN, CHAIN, NAME, CHAIN, SECOND, CHAIN, CHAIN], strict=False)
    ]
    # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
    further = random.Random(f"ensemble {seed}")
    chain, is_many, is_crowded = further.choice(CHAINS), further.random() < MANY_ANSWERS, further.random() < CROWDED
    second = replace(second, decoupled=is_many, computes=second.computes and not is_many)
    habits = [replace(habit, chain=chain, copies=3 if is_crowded else 2) for habit in habits]
    shape = replace(shape, second=second, chained=chain, stateless=STATELESS in chain)
    return replace(plan, shape=shape, gateways=chance.randint(1, 3), habits=habits)


def spread(habit: Habit, chance: random.Random) -> Habit:
    """Half of the clients do that."""
    window = habit.window if habit.style is Style.NUMBERED else 1
    return replace(habit, spreads=True, window=window) if chance.random() < 0.5 else habit


def chained(seed: int) -> Result:
    """Runs one seed of such a mesh."""
    return play(seed, chain_plan(seed), ChainWorld)
