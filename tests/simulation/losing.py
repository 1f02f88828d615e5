"""A store that comes back with older data, in the middle of traffic and faults: a server that was killed before it had
written its file, or a replica that was behind and is the primary now.

The ledger goes back with the store, and judges from there: what was lost is mixed with nothing that was kept. Of
clients whose sequence was open at that moment

    numbered   get the right answers all the same, or are refused
    others     may get answers of a sequence that lacks steps: nobody can tell them

`python -m tests.simulation --lose --seeds 1000`, and `--lose-node`: of a Cluster, one node at a time
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

from shared.contract.ids import SequenceId
from shared.store.connections.homes import tag_of
from tests.simulation.clients import Client
from tests.simulation.nodes import WorldOfNodes
from tests.simulation.story import Story
from tests.simulation.world import Plan, Result, World, plan_of, play

K = TypeVar("K")
V = TypeVar("V")

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
        home = self._loser()
        kept = deepcopy((self.store._values, self.store._deadlines, self.ledger._lives, self.ledger._accepted))
        seconds = self._fate.choice(LOST_S) * self._fate.random()

        def lose() -> None:
            self.story.tell(f"fault: the store {home} ends, and has lost its last {seconds:.3f} s")
            self._is_losing, self.ledger.has_lost = False, True
            self.network.stop(self.network.servers[home])
            self._lose(home, *kept)
            for client in self.clients:
                if isinstance(client, Client):
                    client.losses += 1
            asyncio.get_running_loop().call_later(self._fate.uniform(0.0, 3.0), self._store_is_up)

        asyncio.get_running_loop().call_later(seconds, lose)

    def _loser(self) -> str:
        return ""

    def _lose(self, home: str, *kept: Any) -> None:
        self.store._values, self.store._deadlines, self.ledger._lives, self.ledger._accepted = kept
        self.store.restart()


class LosingNodes(WorldOfNodes, LosingWorld):
    """A mesh on a Cluster, one of whose nodes does that at a time: the others have what it has lost. A sequence whose
    end was lost has its slot again, until a leader has seen who else has it. Two schedulers do not lead in the same
    term: the shards could not tell one from the other.
    """

    async def run(self) -> None:
        self.ledger.resurrects = True
        await super().run()
        leaders = dict[str, str]()
        for name, led in re.findall(r"(\S+) +leading (model=\S+ term=\d+)", "\n".join(self.story.lines)):
            if leaders.setdefault(led, name) != name:
                self.story.violate(f"{name} and {leaders[led]} lead {led}")

    def _loser(self) -> str:
        return self._fate.choice(list(self.network.servers))

    def _lose(self, home: str, *kept: Any) -> None:
        store, ledger = self.store, self.ledger

        def is_lost(key: bytes) -> bool:
            return tag_of(key.decode()) == home

        def is_of_lost(name: tuple[SequenceId, bytes | int]) -> bool:
            return str(self.keys.shard_of(name[0])) == home

        values, deadlines, lives, accepted = kept
        store._values = _with_older(store._values, values, is_lost)
        store._deadlines = _with_older(store._deadlines, deadlines, is_lost)
        ledger._lives = _with_older(ledger._lives, lives, is_of_lost)
        ledger._accepted = _with_older(ledger._accepted, accepted, is_of_lost)
        self.network.servers[home].run += 1


def _with_older(now: dict[K, V], older: dict[K, V], is_lost: Callable[[K], bool]) -> dict[K, V]:
    """What is there when some keys have gone back."""
    kept = {key: value for key, value in now.items() if not is_lost(key)}
    return kept | {key: value for key, value in older.items() if is_lost(key)}


def lost(seed: int) -> Result:
    """Runs one seed of such a mesh. The model is not decoupled: who lacks a step would lack the answers to others."""
    return play_losing(seed, plan_of(seed), LosingWorld)


def lost_node(seed: int) -> Result:
    """Runs one seed of such a mesh on a Cluster."""
    return play_losing(
        seed, replace(plan_of(seed), shards=random.Random(f"nodes {seed}").choice((1, 2, 3))), LosingNodes
    )


def play_losing(seed: int, plan: Plan, world: type[World]) -> Result:
    """Runs one seed of a mesh whose store does that."""
    with patch("scheduler.service.OWNERS_INTERVAL_S", OWNERS_INTERVAL_S):
        return play(seed, replace(plan, shape=replace(plan.shape, decoupled=False)), world)
