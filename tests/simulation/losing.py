"""A store that comes back with older data, in the middle of traffic and faults: a server that was killed before it had
written its file, or a replica that was behind and is the primary now.

The ledger goes back with the store, and judges from there: what was lost is mixed with nothing that was kept. Of
clients whose sequence was open at that moment

    numbered   get the right answers all the same, or are refused
    others     may get answers of a sequence that lacks steps: nobody can tell them

`python -m tests.simulation --lose --seeds 1000`
"""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

from tests.simulation.clients import Client
from tests.simulation.story import Story
from tests.simulation.world import Plan, Result, World, plan_of, play

LOSSES = 0.15
"""The share of faults that are such ones."""
LOST_S = 0.02, 0.2, 1.5
"""As much as this of what was written last is lost, at most."""
OWNERS_INTERVAL_S = 10.0
"""So often schedulers look for what an executor had that was forgotten since."""


class LosingWorld(World):
    """A mesh whose store loses its newest data."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._fate = random.Random(f"lose {seed}")
        self._is_losing = False

    def _fault(self) -> None:
        if self._is_losing or self._fate.random() >= LOSSES:
            super()._fault()
            return
        self._is_losing = True
        ledger = self.ledger
        kept = deepcopy((self.store._values, self.store._deadlines, ledger._lives, ledger._accepted))
        seconds = self._fate.choice(LOST_S) * self._fate.random()

        def lose() -> None:
            self.story.tell(f"fault: the store ends, and has lost its last {seconds:.3f} s")
            self._is_losing = False
            self.network.stop()
            self.store._values, self.store._deadlines, ledger._lives, ledger._accepted = kept
            self.store.restart()
            for client in self.clients:
                if isinstance(client, Client):
                    client.losses += 1
            asyncio.get_running_loop().call_later(self._fate.uniform(0.0, 3.0), self._store_is_up)

        asyncio.get_running_loop().call_later(seconds, lose)


def lost(seed: int) -> Result:
    """Runs one seed of such a mesh. The model is not decoupled: who lacks a step would lack the answers to others."""
    plan = plan_of(seed)
    with patch("scheduler.service.OWNERS_INTERVAL_S", OWNERS_INTERVAL_S):
        return play(seed, replace(plan, shape=replace(plan.shape, decoupled=False)), LosingWorld)
