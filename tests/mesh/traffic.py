"""Traffic of sequences whose every answer is known beforehand: running sums, checked against sums made here.

A lost, doubled or reordered step of a sequence shows in the answer to that step or to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.mesh.running_mesh import PATIENCE_S, RunningMesh

RETRY_PAUSE_S = 0.05


@dataclass(frozen=True)
class Plan:
    """One sequence to be played: its correlation id and the numbers of its steps."""

    id: int | str
    values: tuple[int, ...]

    @property
    def sums(self) -> list[int]:
        """The right answers: the oracle."""
        return list(itertools.accumulate(self.values))

    @property
    def steps(self) -> list[Step]:
        """Its requests, in order."""
        last = len(self.values) - 1
        return [
            Step(self.id, value, start=index == 0, end=index == last, request_id=f"{self.id}/{index}")
            for index, value in enumerate(self.values)
        ]


@dataclass(frozen=True)
class Step:
    """One request of a sequence."""

    id: int | str
    value: int
    start: bool = False
    end: bool = False
    request_id: str = ""
    version: str = ""


def make_plans(chance: random.Random, count: int, *, shortest: int = 1, longest: int = 12) -> list[Plan]:
    """Sequences of random lengths; every other id is a text, and some texts look like another sequence's number."""
    numbers = chance.sample(range(1, 1 << 62), (count + 1) // 2)
    ids: list[int | str] = []
    for position, number in enumerate(numbers):
        ids += [number, str(number) if position % 3 == 0 else f"text {number:x} \u00e9"]
    return [
        Plan(identity, tuple(chance.randint(-1000, 1000) for _ in range(chance.randint(shortest, longest))))
        for identity in ids[:count]
    ]


def tensor(kind: Any, value: int) -> Any:
    """The input of a step; kind: `InferInput` of either client."""
    made = kind("INPUT", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], dtype=np.int32))
    return made


def sum_of(result: Any) -> int:
    """The answer of a step."""
    return int(result.as_numpy("OUTPUT").item())


Call = Callable[[str, Step], Awaitable[int]]
"""Sends one step of a model and returns the answer."""


class Caller:
    """Steps by unary calls of one of tritonclient's asyncio libraries, which have the same names."""

    library: Any

    def __init__(self, url: str) -> None:
        self._client: Any = self.library.InferenceServerClient(url)

    async def __call__(self, model: str, step: Step) -> int:
        result = await self._client.infer(
            model,
            [tensor(self.library.InferInput, step.value)],
            request_id=step.request_id,
            model_version=step.version,
            sequence_id=step.id,
            sequence_start=step.start,
            sequence_end=step.end,
        )
        return sum_of(result)

    async def close(self) -> None:
        await self._client.close()


class HttpCaller(Caller):
    """Steps over HTTP."""

    library = http_aio


class GrpcCaller(Caller):
    """Steps over gRPC."""

    library = grpc_aio


class Callers:
    """Callers of every gateway of a mesh, over both protocols. An async context manager."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self.all: list[HttpCaller | GrpcCaller] = []

    async def __aenter__(self) -> list[HttpCaller | GrpcCaller]:
        for gateway in range(len(self._mesh.gateways)):
            self.all += [HttpCaller(self._mesh.http(gateway)), GrpcCaller(self._mesh.grpc(gateway))]
        return self.all

    async def __aexit__(self, *error: object) -> None:
        for caller in self.all:
            await caller.close()


@dataclass
class Traffic:
    """Sequences of one model played at the same time, one caller each, steps one after the other.

    retries   whether a step that was not answered is sent again, with the same request id, through another gateway
    pause_s   mean pause between two steps of a sequence
    """

    model: str
    callers: Sequence[HttpCaller | GrpcCaller]
    plans: Sequence[Plan]
    chance: random.Random
    retries: bool = False
    pause_s: float = 0.02
    answered: int = 0
    repeated: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def total(self) -> int:
        """Steps of all sequences."""
        return sum(len(plan.values) for plan in self.plans)

    async def run(self) -> None:
        """Plays everything. Fails, naming every wrong answer, when there is one."""
        async with asyncio.TaskGroup() as group:
            for plan in self.plans:
                group.create_task(self._play(plan, random.Random(self.chance.random())))
        assert not self.wrong, "\n".join(self.wrong)

    async def progress(self, share: float) -> None:
        """Returns when that share of all steps has been answered."""
        target = min(self.total, int(self.total * share))
        deadline = time.monotonic() + PATIENCE_S
        while self.answered < target:
            assert time.monotonic() < deadline, f"only {self.answered} of {self.total} steps were answered"
            await asyncio.sleep(0.005)

    async def _play(self, plan: Plan, chance: random.Random) -> None:
        for step, expected in zip(plan.steps, plan.sums, strict=True):
            began = time.monotonic()
            repeated = self.repeated
            answer = await self._call(step, chance)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.answered += 1
            if answer != expected:
                again = " (sent again meanwhile)" if self.repeated > repeated else ""
                self.wrong.append(f"{step} of {plan.values}: expected {expected}, got {answer}{again}")
            await asyncio.sleep(chance.uniform(0, 2 * self.pause_s))

    async def _call(self, step: Step, chance: random.Random) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await chance.choice(self.callers)(self.model, step)
            except Exception as error:
                if not (self.retries and is_interruption(error)) or time.monotonic() > deadline:
                    error.add_note(f"{step}, {self.answered} of {self.total} steps answered")
                    raise
                self.repeated += 1
            await asyncio.sleep(RETRY_PAUSE_S)


def is_interruption(error: BaseException) -> bool:
    """Whether nothing is known of the request's fate, or the mesh asks to try again: what a client retries."""
    if isinstance(error, InferenceServerException):
        return error.status() in ("StatusCode.UNAVAILABLE", "503")
    return isinstance(error, OSError) or type(error).__module__.startswith("aiohttp")


def little_endian(value: int) -> bytes:
    """An INT32 tensor of one element, as it travels."""
    return struct.pack("<i", value)
