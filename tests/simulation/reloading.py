"""A model that is loaded anew, unloaded and loaded again, in the middle of traffic, faults, and what an operator does.

The operator (operator.py) gives the commands as a gateway does: for every executor, and for those that start later.
Every second load has another content, which its states depend on: what was accepted is answered all the same, and of
sequences with the older state the next step hears that it is lost.

`python -m tests.simulation --reload --seeds 1000`
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from executor.settings import ExecutorSettings
from shared.contract.errors import Code
from shared.contract.messages import ControlMessage, encode
from shared.store.sequences import Sequences
from tests.simulation.clients import Asker, Client, Door, Habit
from tests.simulation.model import NAME, STATELESS, content_of
from tests.simulation.operator import OperatedWorld
from tests.simulation.story import Story
from tests.simulation.world import LEASE_MS, Plan, Result, plan_of, play


class ReloadedWorld(OperatedWorld):
    """A mesh whose operator loads and unloads its model."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._generations = Counter[str]()
        self._away = ""
        """The model that is unloaded."""
        # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
        self._tastes = random.Random(f"loads {seed}")

    def _executor_settings(self, name: str) -> ExecutorSettings:
        common = self._common(name)
        return ExecutorSettings(
            models=(Path(),), lease_ms=LEASE_MS, model_control_mode="explicit", load_model=("*",), **common
        )

    def _client(self, index: int, habit: Habit, doors: list[Door]) -> Client:
        client = super()._client(index, habit, doors)
        # What hears it while the model is away.
        client.excused |= {Code.NOT_FOUND}
        return client

    def _asker(self, index: int, doors: list[Door]) -> Asker:
        asker = super()._asker(index, doors)
        asker.excused |= {Code.NOT_FOUND}
        return asker

    async def _do_something(self, sequences: Sequences) -> None:
        if self._away and (self._calm or self._whims.random() < 0.5):
            await self._command("load", self._away)
        elif not self._calm and not self._away and self._whims.random() < 0.3:
            is_other = self.plan.shape.has_stateless and self._tastes.random() < 0.5
            await self._command(self._whims.choice(("load", "load", "unload")), STATELESS if is_other else NAME)
        await super()._do_something(sequences)

    async def _command(self, action: str, model: str) -> None:
        """As `gateway.models.repository` gives it. The operator may die before it has heard what became of it."""
        before = content_of(self._generations[model])
        self._generations[model] += 1
        generation = self._generations[model]
        if action == "unload":
            self._away = model
        if model == NAME and (self._away or content_of(generation) != before):
            self.ledger.declared = False
        self.story.tell(f"the operator wants the model {model} to be {action}ed, as load {generation}")
        word = ControlMessage(action, model, generation=str(generation))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.keys.wanted, model, encode(word))
            pipe.xadd(self.keys.control, {"n": model})
            await pipe.execute()
        if action == "load":
            self._away = ""


def reloaded(seed: int) -> Result:
    """Runs one seed with an operator who loads and unloads the model. As of `operated`, it is not decoupled."""
    plan = plan_of(seed)
    return play(seed, replace(plan, shape=replace(plan.shape, decoupled=False)), ReloadedWorld)
