"""Closed-loop load over gRPC: callers that each send a step when the one before is answered.

Requests are joined from parts that were encoded before, because callers and mesh share the machine. Nothing is checked
but that each step was answered: whether answers are right is for tests.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as _service_pb2

from deploy.analyze.inputs import Step
from deploy.analyze.search import Measured

# The classes that protobuf generates at import have no types.
service_pb2: Any = _service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
PAUSE_AFTER_ERROR_S = 0.05
FIRST_ANSWER_S = 10.0
"""How long the first answer may take. A mesh that has just started may let the first sequence wait half a second for
its slot, and what a model does once comes then, too."""
ERROR_TEXT_MAX = 200


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """warmup_s, window_s: seconds from the first answer to the first round, and of each round"""

    concurrency: int
    rounds: int
    warmup_s: float
    window_s: float


@dataclass(slots=True)
class AnswerTimes:
    """What was answered in one round. seconds: its length; latencies_s: of each step"""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])
    errors: Counter[str] = field(default_factory=Counter[str])


class ClosedLoop:
    """The load on one model. sequences: what is sent; is_sequence: whether the model has sequences"""

    def __init__(self, address: str, model: str, sequences: Sequence[Sequence[Step]], *, is_sequence: bool) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call: Any = self._channel.unary_unary(INFER, request_serializer=None, response_deserializer=None)
        self._sequences = [[request_part(model, step) for step in sequence] for sequence in sequences]
        self._is_sequence = is_sequence
        self._ids = itertools.count(1)
        self._answers = AnswerTimes()
        self._answered = asyncio.Event()

    async def measure(self, plan: LoadPlan, read_memory: Callable[[], int]) -> Measured:
        """The medians over the rounds of a load. read_memory: asked after each round, bytes"""
        callers = [asyncio.create_task(self._caller(), name="caller") for _ in range(plan.concurrency)]
        rounds: list[AnswerTimes] = []
        memory = [0]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_ANSWER_S):
                    await self._answered.wait()
            await asyncio.sleep(plan.warmup_s)
            for _ in range(plan.rounds):
                self._answers = AnswerTimes()
                began = time.perf_counter()
                await asyncio.sleep(plan.window_s)
                # Measured, because the loop may wake late.
                self._answers.seconds = time.perf_counter() - began
                rounds.append(self._answers)
                self._answers = AnswerTimes()
                memory.append(await asyncio.to_thread(read_memory))
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            await self._channel.close()
        return summary(rounds, max(memory))

    async def _caller(self) -> None:
        while True:
            for sequence in self._sequences:
                identity = next(self._ids)
                for number, part in enumerate(sequence):
                    end = number == len(sequence) - 1
                    flags = sequence_part(identity, start=number == 0, end=end) if self._is_sequence else b""
                    if not await self._send(part + flags):
                        break

    async def _send(self, request: bytes) -> bool:
        began = time.perf_counter()
        try:
            await self._call(request)
        except grpc.aio.AioRpcError as error:
            self._answered.set()
            self._answers.errors[f"{error.code().name}: {(error.details() or '')[:ERROR_TEXT_MAX]}"] += 1
            await asyncio.sleep(PAUSE_AFTER_ERROR_S)
            return False
        self._answers.latencies_s.append(time.perf_counter() - began)
        self._answered.set()
        return True


def request_part(model: str, step: Step) -> bytes:
    """A request without its sequence."""
    message: Any = service_pb2.ModelInferRequest(model_name=model)
    for tensor in step:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.raw)
    return message.SerializeToString()


def sequence_part(identity: int, *, start: bool, end: bool) -> bytes:
    """The part of a request that names its sequence. (Concatenated protobuf messages are one message.)"""
    message: Any = service_pb2.ModelInferRequest()
    message.parameters["sequence_id"].int64_param = identity
    message.parameters["sequence_start"].bool_param = start
    message.parameters["sequence_end"].bool_param = end
    return message.SerializeToString()


def summary(rounds: Sequence[AnswerTimes], memory_bytes: int) -> Measured:
    """The medians of several rounds. Errors, or a round without an answer, are a problem."""
    rates = [len(one.latencies_s) / one.seconds for one in rounds]
    errors = Counter[str]()
    for one in rounds:
        errors.update(one.errors)
    if errors:
        text, count = errors.most_common(1)[0]
        return Measured(statistics.mean(rates), problem=f"{errors.total()} steps failed, {count} of them with: {text}")
    if not all(one.latencies_s for one in rounds):
        return Measured(statistics.mean(rates), problem="no step was answered")
    rate = statistics.median(rates)
    return Measured(
        steps_per_s=rate,
        p50_ms=statistics.median(quantile_ms(one, 0.50) for one in rounds),
        p99_ms=statistics.median(quantile_ms(one, 0.99) for one in rounds),
        memory_bytes=memory_bytes,
        noise=(max(rates) - min(rates)) / 2 / rate,
    )


def quantile_ms(answers: AnswerTimes, share: float) -> float:
    """The latency that a share of the steps does not exceed."""
    ordered = sorted(answers.latencies_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000
