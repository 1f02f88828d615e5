"""An ensemble of two models with states, beside clients of each model, and clients that spread their steps.

Gateways drive the steps of an ensemble: one is killed between the two states, a client asks for a step again through
another one, and both states are at the same step all the same. Some clients send each step through another gateway, and
some steps through two at once.

`python -m tests.simulation --chain --seeds 1000`
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.beside import TwoModels
from tests.simulation.clients import Habit, Style
from tests.simulation.model import CHAIN, NAME, SECOND
from tests.simulation.world import Plan, Result, plan_of, play


def chain_plan(seed: int) -> Plan:
    """What a seed means for such a mesh. What fails in a model ends a sequence of the ensemble, so no input does. Nor
    is a model decoupled: in an ensemble only its last step with a state could be.
    """
    plan, chance = plan_of(seed), random.Random(f"chain {seed}")
    shape = replace(plan.shape, decoupled=False, declared=True)
    second = replace(shape, slots=chance.randint(1, 3), instances=chance.choice((1, 2)), interval=1, rows=0)
    habits = [
        replace(spread(habit, chance), model=model, fails=0.0)
        for habit, model in zip(plan.habits, [CHAIN, CHAIN, NAME, CHAIN, SECOND, CHAIN, CHAIN], strict=False)
    ]
    shape = replace(shape, second=second, chained=True)
    return replace(plan, shape=shape, gateways=chance.randint(1, 3), habits=habits)


def spread(habit: Habit, chance: random.Random) -> Habit:
    """Half of the clients do that."""
    window = habit.window if habit.style is Style.NUMBERED else 1
    return replace(habit, spreads=True, window=window) if chance.random() < 0.5 else habit


def chained(seed: int) -> Result:
    """Runs one seed of such a mesh."""
    return play(seed, chain_plan(seed), TwoModels)
