"""A model that is loaded anew, unloaded and loaded again, in the middle of traffic, faults, and what an operator does.

The operator (operator.py) gives the commands as a gateway does: for every executor, and for those that start later.
Every second load has another content, which its states depend on: what was accepted is answered all the same, and of
sequences with the older state the next step hears that it is lost.

`python -m tests.simulation --reload --seeds 1000`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from executor.settings import ExecutorSettings
from shared.contract.errors import Code
from shared.contract.messages import ControlMessage, encode
from shared.store.sequences import Sequences
from tests.simulation.clients import Client, Door, Habit
from tests.simulation.model import NAME, content_of
from tests.simulation.operator import OperatedWorld
from tests.simulation.world import LEASE_MS, Result, plan_of, play


class ReloadedWorld(OperatedWorld):
    """A mesh whose operator loads and unloads its model."""

    _generation = 0
    _is_away = False

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

    async def _do_something(self, sequences: Sequences) -> None:
        if self._is_away and (self._calm or self._whims.random() < 0.5):
            await self._command("load")
        elif not self._calm and not self._is_away and self._whims.random() < 0.3:
            await self._command(self._whims.choice(("load", "load", "unload")))
        await super()._do_something(sequences)

    async def _command(self, action: str) -> None:
        """As `gateway.models.repository` gives it. The operator may die before it has heard what became of it."""
        before = content_of(self._generation)
        self._generation += 1
        self._is_away |= action == "unload"
        if self._is_away or content_of(self._generation) != before:
            self.ledger.declared = False
        self.story.tell(f"the operator wants the model to be {action}ed, as load {self._generation}")
        word = ControlMessage(action, NAME, generation=str(self._generation))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.keys.wanted, NAME, encode(word))
            pipe.xadd(self.keys.control, {"n": NAME})
            await pipe.execute()
        self._is_away = action == "unload"


def reloaded(seed: int) -> Result:
    """Runs one seed with an operator who loads and unloads the model. As of `operated`, it is not decoupled."""
    plan = plan_of(seed)
    return play(seed, replace(plan, shape=replace(plan.shape, decoupled=False)), ReloadedWorld)
