"""Running sums that go on for as long as a test needs them, over HTTP and gRPC, each answer checked as it comes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.e2e.compose_mesh import ComposeMesh
from tests.mesh.running_mesh import eventually
from tests.mesh.traffic import GrpcCaller, HttpCaller, Step

MODEL = "running_sum"
SEQUENCES = 24
"""Fewer than the slots of one executor: the survivor of two must be able to take them all."""
PAUSE_S = 0.4
"""Between two steps of a sequence, on average: enough steps to catch whatever happens, little load."""
ANSWER_TIMEOUT_S = 120.0
"""Until every sequence is answered: a takeover, on a machine that starts containers at the same time."""

Callers = list[HttpCaller | GrpcCaller]


@asynccontextmanager
async def callers_of(mesh: ComposeMesh) -> AsyncGenerator[Callers]:
    """A caller of each protocol, through the published ports."""
    callers: Callers = [HttpCaller(mesh.address(8000)), GrpcCaller(mesh.address(8001))]
    try:
        yield callers
    finally:
        for caller in callers:
            await caller.close()


class OpenSums:
    """Sequences that are all open at the same time: one caller each, steps one after the other.

    No step is sent twice by the caller; each has a request id, so that the gateway may do so when it loses Redis.
    """

    def __init__(self, callers: Callers, chance: random.Random) -> None:
        self._callers = callers
        self._chance = chance
        self._closing = False
        self._answered = dict.fromkeys(self._ids(), 0)
        self.wrong: list[str] = []

    def _ids(self) -> list[int | str]:
        numbers = self._chance.sample(range(1, 1 << 62), SEQUENCES)
        return [number if position % 2 else f"text {number:x}" for position, number in enumerate(numbers)]

    def start(self, group: asyncio.TaskGroup) -> None:
        """Begins every sequence. A request that fails ends the group."""
        for identity in self._answered:
            group.create_task(self._play(identity, random.Random(self._chance.random())))

    def close(self) -> None:
        """Each sequence ends with its next step."""
        self._closing = True

    async def all_answer(self) -> None:
        """Returns when every sequence has got two more answers: at least one of them to a step sent since the call."""
        goals = {identity: count + 2 for identity, count in self._answered.items()}
        await eventually(
            lambda: all(self._answered[identity] >= goal for identity, goal in goals.items()),
            "every sequence is answered",
            ANSWER_TIMEOUT_S,
        )

    async def _play(self, identity: int | str, chance: random.Random) -> None:
        total, is_open = 0, True
        while is_open:
            is_open = not self._closing
            value = chance.randint(-1000, 1000)
            total += value
            number = self._answered[identity]
            step = Step(identity, value, start=number == 0, end=not is_open, request_id=f"{identity}/{number}")
            answer = await chance.choice(self._callers)(MODEL, step)
            self._answered[identity] = number + 1
            if answer != total:
                self.wrong.append(f"{identity}, step {number}: expected {total}, got {answer}")
            await asyncio.sleep(chance.uniform(0, 2 * PAUSE_S))


@asynccontextmanager
async def open_sums(mesh: ComposeMesh, chance: random.Random) -> AsyncGenerator[OpenSums]:
    """Sums under way. On leaving they have ended, no request has failed, and every answer was right."""
    async with callers_of(mesh) as callers:
        async with asyncio.TaskGroup() as group:
            sums = OpenSums(callers, chance)
            sums.start(group)
            await sums.all_answer()
            yield sums
            await sums.all_answer()
            sums.close()
        assert sums.wrong == []
