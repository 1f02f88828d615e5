"""Traffic of sequences whose every answer is known beforehand: running sums, checked against sums made here.

A lost, doubled or reordered step of a sequence shows in the answer to that step or to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_sync
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from deploy.chaos.clients import NOT_WRITTEN
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually

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
            Step(self.id, value, start=index == 0, end=index == last, request_id=f"{self.id}/{index}", number=index + 1)
            for index, value in enumerate(self.values)
        ]


@dataclass(frozen=True)
class Step:
    """One request of a sequence. number: since its START, 0 where the client does not say."""

    id: int | str
    value: int
    start: bool = False
    end: bool = False
    request_id: str = ""
    version: str = ""
    number: int = 0

    @property
    def flags(self) -> dict[str, Any]:
        """As arguments of tritonclient."""
        numbered = {"parameters": {"sequence_step": self.number}} if self.number else {}
        return {
            "request_id": self.request_id,
            "model_version": self.version,
            "sequence_id": self.id,
            "sequence_start": self.start,
            "sequence_end": self.end,
            **numbered,
        }


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
        self.url = url
        self._client: Any = self.library.InferenceServerClient(url)

    async def __call__(self, model: str, step: Step) -> int:
        return sum_of(await self._client.infer(model, [tensor(self.library.InferInput, step.value)], **step.flags))

    async def close(self) -> None:
        await self._client.close()


class HttpCaller(Caller):
    """Steps over HTTP."""

    library = http_aio


class GrpcCaller(Caller):
    """Steps over gRPC."""

    library = grpc_aio


class StreamCaller(GrpcCaller):
    """Steps over one gRPC stream, which is opened with the first step and after it has broken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._open: deque[asyncio.Future[int]] = deque()
        self._reader: asyncio.Task[None] | None = None

    async def __call__(self, model: str, step: Step) -> int:
        if self._reader is None:
            self._requests = asyncio.Queue()
            self._reader = asyncio.create_task(self._read(self._requests))
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        inputs = [tensor(self.library.InferInput, step.value)]
        self._requests.put_nowait({"model_name": model, "inputs": inputs, **step.flags})
        return await answer

    async def _read(self, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
        async def sent() -> AsyncIterator[dict[str, Any]]:
            while (request := await requests.get()) is not None:
                yield request

        broken: Exception = ConnectionError("the stream has ended")
        try:
            async for result, error in self._client.stream_infer(sent()):
                answer = self._open.popleft()
                if answer.cancelled():
                    continue
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(sum_of(result))
        except grpc.aio.AioRpcError as error:
            broken = InferenceServerException(error.details() or "", status=str(error.code()))
        requests.put_nowait(None)
        self._reader = None
        while self._open:
            answer = self._open.popleft()
            if not answer.cancelled():
                answer.set_exception(broken)

    async def close(self) -> None:
        if self._reader is not None:
            self._requests.put_nowait(None)
            await self._reader
        await super().close()


class Callers:
    """Callers of every gateway of a mesh, over both protocols. An async context manager.

    streams  with one gRPC stream to each
    """

    def __init__(self, mesh: RunningMesh, *, streams: bool = False) -> None:
        self._mesh = mesh
        self._streams = streams
        self.all: list[Caller] = []

    def add(self, http_url: str, grpc_url: str) -> None:
        """Callers of one gateway more."""
        self.all += [HttpCaller(http_url), GrpcCaller(grpc_url)]
        if self._streams:
            self.all.append(StreamCaller(grpc_url))

    async def __aenter__(self) -> list[Caller]:
        for gateway in range(len(self._mesh.gateways)):
            self.add(self._mesh.http(gateway), self._mesh.grpc(gateway))
        return self.all

    async def __aexit__(self, *error: object) -> None:
        for caller in self.all:
            await caller.close()


@dataclass
class Traffic:
    """Sequences of one model played at the same time, one caller each, steps one after the other.

    retries   whether a step that was not answered is sent again, with the same request id, through another gateway
    pause_s   mean pause between two steps of a sequence
    numbered  whether steps are known by their number (`sequence_step`) instead of a request id
    """

    model: str
    callers: Sequence[Call]
    plans: Sequence[Plan]
    chance: random.Random
    retries: bool = False
    pause_s: float = 0.02
    numbered: bool = False
    answered: int = 0
    repeated: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list[str])
    interruptions: Counter[str] = field(default_factory=Counter[str])
    open: set[Step] = field(default_factory=set[Step])
    begun: set[Plan] = field(default_factory=set[Plan])

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

    async def run_until(self, over: asyncio.Event) -> None:
        """Plays sequences like the plans, as many at the same time, until it is over and the last ones have ended."""

        async def play(chance: random.Random) -> None:
            while not over.is_set():
                (plan,) = make_plans(chance, 1, shortest=8, longest=16)
                await self._play(plan, chance)

        async with asyncio.TaskGroup() as group:
            for _ in self.plans:
                group.create_task(play(random.Random(self.chance.random())))
        assert not self.wrong, "\n".join(self.wrong)

    async def progress(self, share: float) -> None:
        """Returns when that share of all steps has been answered."""
        target = min(self.total, int(self.total * share))
        await eventually(lambda: self.answered >= target, f"{target} of {self.total} steps are answered")

    async def more(self, steps: int) -> None:
        """Returns when so many steps more have been answered."""
        target = self.answered + steps
        await eventually(lambda: self.answered >= target, f"{steps} steps more are answered")

    async def all_begun(self) -> None:
        """Returns when the first step of every sequence has been answered: each has a slot."""
        await eventually(lambda: len(self.begun) == len(self.plans), "every sequence has begun")

    async def settled(self) -> None:
        """Returns when every step that is open now has been answered."""
        now_open = set(self.open)
        await eventually(lambda: not now_open & self.open, "the open steps are answered")

    async def _play(self, plan: Plan, chance: random.Random) -> None:
        for step, expected in zip(plan.steps, plan.sums, strict=True):
            began = time.monotonic()
            repeated = self.repeated
            known_by = {"request_id": ""} if self.numbered else {"number": 0}
            self.open.add(step)
            answer = await self._call(replace(step, **known_by), chance)
            self.open.remove(step)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.answered += 1
            self.begun.add(plan)
            if answer != expected:
                again = " (sent again meanwhile)" if self.repeated > repeated else ""
                self.wrong.append(f"{self.model}: {step} of {plan.values}: expected {expected}, got {answer}{again}")
            await asyncio.sleep(chance.uniform(0, 2 * self.pause_s))

    async def _call(self, step: Step, chance: random.Random) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await chance.choice(self.callers)(self.model, step)
            except Exception as error:
                if not (self.retries and is_interruption(error)) or time.monotonic() > deadline:
                    error.add_note(f"{self.model}: {step}, {self.answered} of {self.total} steps answered")
                    raise
                self.repeated += 1
                self.interruptions[str(error)] += 1
            await asyncio.sleep(RETRY_PAUSE_S)


def is_interruption(error: BaseException) -> bool:
    """Whether nothing is known of the request's fate, or the mesh asks to try again: what a client retries."""
    if isinstance(error, InferenceServerException):
        told: Any = error
        return bool(told.status() in ("StatusCode.UNAVAILABLE", "503") or told.message() == NOT_WRITTEN)
    return isinstance(error, OSError) or type(error).__module__.startswith("aiohttp")


class Player:
    """The client of a sequence of `running_sum` that numbers its steps and believes what it is told: where the mesh has
    forgotten steps, it plays them again. Every answer must be the sum of the steps before it, whatever was forgotten.
    """

    def __init__(self, plan: Plan, callers: Sequence[Call], chance: random.Random) -> None:
        self._plan = plan
        self._callers = callers
        self._chance = chance
        self.done = 0
        self.forgotten = 0

    async def play(self, until: int) -> None:
        """Steps up to that one."""
        async with asyncio.timeout(PATIENCE_S):
            while self.done < until:
                await self._step(replace(self._plan.steps[self.done], request_id=""))

    async def _step(self, step: Step) -> None:
        try:
            answer = await self._chance.choice(self._callers)("running_sum", step)
        except Exception as error:
            if (last := last_step(error)) is not None:
                self.forgotten += self.done - last
                self.done = last
            elif not is_interruption(error):
                raise
            await asyncio.sleep(0.02)
            return
        assert self._plan.sums[self.done] == answer, f"{step}, after {self.forgotten} forgotten steps"
        self.done += 1


def last_step(error: Exception) -> int | None:
    """How far the mesh says that the sequence has come, where that is elsewhere than the client thought."""
    if found := re.search(r"expects step (\d+) next", str(error)):
        return int(found[1]) - 1
    return 0 if "must specify the START flag" in str(error) else None


async def play_stateless(client: Any, chance: random.Random, count: int, answered: list[None]) -> None:
    """One caller's requests of `add_sub`, each answered rightly, which `answered` counts."""
    for _ in range(count):
        first, second = (np.full((1, 16), chance.randint(-99, 99), np.float32) for _ in range(2))
        inputs = [http_aio.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
        for made, array in zip(inputs, (first, second), strict=True):
            made.set_data_from_numpy(array)
        result = await client.infer("add_sub", inputs)
        assert (first + second).tolist() == result.as_numpy("OUTPUT0").tolist()
        assert (first - second).tolist() == result.as_numpy("OUTPUT1").tolist()
        answered.append(None)
        await asyncio.sleep(0.005)


def infer(mesh: RunningMesh, model: str, value: int, *, gateway: int = 0, **flags: Any) -> int:
    """One step or request. Blocks."""
    with http_sync.InferenceServerClient(mesh.http(gateway), network_timeout=2 * PATIENCE_S) as client:
        return sum_of(client.infer(model, [tensor(http_sync.InferInput, value)], **flags))


async def refused(answer: Any) -> str:
    """What the mesh says in place of an answer."""
    with pytest.raises(InferenceServerException) as told:
        await answer
    return str(told.value)
