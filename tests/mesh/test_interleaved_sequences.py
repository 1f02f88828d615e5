"""Many sequences at once, over every way in which tritonclient talks to a server."""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_sync
import tritonclient.http.aio as http_aio

from tests.mesh.running_mesh import RunningMesh
from tests.mesh.traffic import Caller, Callers, GrpcCaller, HttpCaller, Plan, Step, Traffic, make_plans, sum_of, tensor

SEQUENCES = 64
THREADS = 4


def interleaved(plans: Sequence[Plan], chance: random.Random) -> Iterator[tuple[int, Step]]:
    """All steps of all plans in a random order that keeps each plan's own, without numbers; with the plan's index."""
    order = [index for index, plan in enumerate(plans) for _ in plan.values]
    chance.shuffle(order)
    steps = [iter(plan.steps) for plan in plans]
    for index in order:
        yield index, replace(next(steps[index]), number=0)


Answers = list[list[int]]
"""Per plan, what its steps were answered."""


def in_threads(plans: Sequence[Plan], play: Callable[[list[Plan]], Answers]) -> Answers:
    """Plays shares of the plans in several threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        shares = list(pool.map(play, [list(plans[thread::THREADS]) for thread in range(THREADS)]))
    answers: Answers = [[] for _ in plans]
    for thread, share in enumerate(shares):
        answers[thread::THREADS] = share
    return answers


def http(mesh: RunningMesh, model: str, plans: Sequence[Plan], chance: random.Random) -> Answers:
    """tritonclient.http, one request after the other in each of several threads."""
    seed = chance.random()

    def play(share: list[Plan]) -> Answers:
        answers: Answers = [[] for _ in share]
        with http_sync.InferenceServerClient(mesh.http()) as client:
            for index, step in interleaved(share, random.Random(seed)):
                result = client.infer(model, [tensor(http_sync.InferInput, step.value)], **step.flags)
                answers[index].append(sum_of(result))
        return answers

    return in_threads(plans, play)


def http_async_infer(mesh: RunningMesh, model: str, plans: Sequence[Plan], chance: random.Random) -> Answers:
    """tritonclient.http's `async_infer`: the next step of every sequence at the same time, round by round."""
    answers: Answers = [[] for _ in plans]
    with http_sync.InferenceServerClient(mesh.http(), concurrency=16) as client:
        for number in range(max(len(plan.values) for plan in plans)):
            pending: list[tuple[int, Any]] = []
            for index in chance.sample(range(len(plans)), len(plans)):
                if number < len(plans[index].values):
                    step = replace(plans[index].steps[number], number=0)
                    inputs = [tensor(http_sync.InferInput, step.value)]
                    pending.append((index, client.async_infer(model, inputs, **step.flags)))
            for index, request in pending:
                answers[index].append(sum_of(request.get_result()))
    return answers


def grpc(mesh: RunningMesh, model: str, plans: Sequence[Plan], chance: random.Random) -> Answers:
    """tritonclient.grpc, unary, one request after the other in each of several threads."""
    seed = chance.random()
    with grpc_sync.InferenceServerClient(mesh.grpc()) as client:

        def play(share: list[Plan]) -> Answers:
            answers: Answers = [[] for _ in share]
            for index, step in interleaved(share, random.Random(seed)):
                result = client.infer(model, [tensor(grpc_sync.InferInput, step.value)], **step.flags)
                answers[index].append(sum_of(result))
            return answers

        return in_threads(plans, play)


def grpc_async_infer(mesh: RunningMesh, model: str, plans: Sequence[Plan], chance: random.Random) -> Answers:
    """tritonclient.grpc's `async_infer`: the next step of every sequence at the same time, round by round."""
    answers: Answers = [[] for _ in plans]
    with grpc_sync.InferenceServerClient(mesh.grpc()) as client:
        arrived: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
        for number in range(max(len(plan.values) for plan in plans)):
            sent = 0
            for index in chance.sample(range(len(plans)), len(plans)):
                if number < len(plans[index].values):
                    step = replace(plans[index].steps[number], number=0)

                    def arrive(result: Any, error: Any, index: int = index) -> None:
                        arrived.put((index, result, error))

                    client.async_infer(model, [tensor(grpc_sync.InferInput, step.value)], arrive, **step.flags)
                    sent += 1
            for _ in range(sent):
                index, result, error = arrived.get(timeout=60)
                assert error is None
                answers[index].append(sum_of(result))
    return answers


def grpc_stream(mesh: RunningMesh, model: str, plans: Sequence[Plan], chance: random.Random) -> Answers:
    """tritonclient.grpc's stream: every step of every sequence is sent before the first answer is looked at."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    answers: Answers = [[] for _ in plans]
    with grpc_sync.InferenceServerClient(mesh.grpc()) as client:

        def arrive(result: Any, error: Any) -> None:
            arrived.put((result, error))

        client.start_stream(arrive)
        order = list(interleaved(plans, chance))
        for _, step in order:
            client.async_stream_infer(model, [tensor(grpc_sync.InferInput, step.value)], **step.flags)
        for index, step in order:
            result, error = arrived.get(timeout=60)
            assert error is None
            assert step.request_id == result.get_response().id
            answers[index].append(sum_of(result))
        client.stop_stream()
    return answers


SYNC = (http, http_async_infer, grpc, grpc_async_infer, grpc_stream)


@pytest.mark.parametrize("play", SYNC, ids=lambda play: play.__name__)
async def test_64_interleaved_sequences_are_each_summed_as_if_alone(
    mesh: RunningMesh, chance: random.Random, play: Callable[..., Answers]
) -> None:
    plans = make_plans(chance, SEQUENCES)

    answers = await asyncio.to_thread(play, mesh, "running_sum", plans, chance)

    assert [plan.sums for plan in plans] == answers


@pytest.mark.parametrize("model", ["running_sum", "oldest_sum"])
@pytest.mark.parametrize("protocol", [HttpCaller, GrpcCaller], ids=["http", "grpc"])
async def test_64_interleaved_sequences_of_asyncio_clients_are_each_summed_as_if_alone(
    mesh: RunningMesh, chance: random.Random, protocol: type[Caller], model: str
) -> None:
    caller = protocol(mesh.http(1) if protocol is HttpCaller else mesh.grpc(1))

    await Traffic(model, [caller], make_plans(chance, SEQUENCES), chance, pause_s=0).run()

    await caller.close()


async def test_64_interleaved_sequences_on_an_asyncio_stream_are_answered_in_order(
    mesh: RunningMesh, chance: random.Random
) -> None:
    plans = make_plans(chance, SEQUENCES)
    order = list(interleaved(plans, chance))
    answers: Answers = [[] for _ in plans]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for _, step in order:
            inputs = [tensor(grpc_aio.InferInput, step.value)]
            yield {"model_name": "running_sum", "inputs": inputs, **step.flags}

    async with grpc_aio.InferenceServerClient(mesh.grpc()) as client:
        places = iter(order)
        async for result, error in cast("Any", client).stream_infer(requests()):
            assert error is None
            index, step = next(places)
            assert step.request_id == result.get_response().id
            answers[index].append(sum_of(result))

    assert [plan.sums for plan in plans] == answers


async def test_each_step_of_a_sequence_may_come_through_another_gateway_and_protocol(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with Callers(mesh) as callers:
        await Traffic("running_sum", callers, make_plans(chance, SEQUENCES), chance, pause_s=0.002).run()


PIECES = ("Alice ", "was ", "beginning ", "to get very ", "tired of ", "sitting by ", "her sister ")


async def continued(client: Any, sequence: str, *, slowly: bool) -> list[bytes]:
    """What text_lstm expects after each piece of a text."""
    outlooks: list[bytes] = []
    for number, piece in enumerate(PIECES):
        text = http_sync.InferInput("TEXT", [1, len(piece)], "UINT8")
        text.set_data_from_numpy(np.frombuffer(piece.encode(), dtype=np.uint8).reshape(1, -1))
        result = await client.infer(
            "text_lstm",
            [text],
            sequence_id=sequence,
            sequence_start=number == 0,
            sequence_end=number == len(PIECES) - 1,
        )
        outlooks.append(result.as_numpy("CONTINUATION").tobytes())
        await asyncio.sleep(0.01 if slowly else 0)
    return outlooks


async def test_interleaved_texts_are_continued_as_one_text_alone(mesh: RunningMesh) -> None:
    async with http_aio.InferenceServerClient(mesh.http()) as client:
        alone = await continued(client, "a text alone", slowly=False)
        together = await asyncio.gather(
            *(continued(client, f"text {number}", slowly=number % 2 == 0) for number in range(12))
        )

    assert [alone] * 12 == together
    assert len(set(alone)) > 1
