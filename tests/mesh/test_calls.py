"""Models that call other models, over real processes, and whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from shared.contract.ids import sequence_id
from shared.contract.record import ACCEPTED
from tests.mesh.calling_models import KNOT, TWICE, TWICE_DYING, TWICE_LATER, TWICE_OTHERWISE, Doubled, add_calling_model
from tests.mesh.model_repository import add_sum_model, put_in_processes
from tests.mesh.running_mesh import RunningMesh, instances_of, running_mesh, wait
from tests.mesh.traffic import Callers, Traffic, infer, make_plans

CALLERS = ["twice", "twice_later", "twice_apart", "twice_later_apart"]
KNOTS = [("knot_a", "knot_b"), ("apart_a", "apart_b")]
"""Pairs of models that call each other. Of both lists: instances are threads, and processes of their own."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    directory = tmp_path_factory.mktemp("calls")
    models = directory / "models"
    add_sum_model(models)
    add_calling_model(models, "twice", TWICE, sequences=True)
    add_calling_model(models, "twice_later", TWICE_LATER, sequences=True)
    for name, code in (("twice_apart", TWICE), ("twice_later_apart", TWICE_LATER)):
        put_in_processes(models, add_calling_model(models, name, code, sequences=True))
    add_calling_model(models, "twice_dying", TWICE_DYING, sequences=True)
    add_calling_model(models, "twice_otherwise", TWICE_OTHERWISE, sequences=True)
    for first, second in KNOTS:
        add_calling_model(models, first, KNOT, calls=second, rows=1)
        add_calling_model(models, second, KNOT, calls=first, rows=1)
    put_in_processes(models, *KNOTS[1])
    with running_mesh(directory / "data", [models], gateways=2, executors=2) as mesh:
        yield mesh


def doubled(chance: random.Random, count: int, *, longest: int = 8) -> list[Doubled]:
    return [Doubled(plan.id, plan.values) for plan in make_plans(chance, count, shortest=2, longest=longest)]


@pytest.mark.parametrize("model", CALLERS)
async def test_the_sequences_of_calls_are_the_callers(shared: RunningMesh, model: str) -> None:
    chance = random.Random(7)
    async with Callers(shared, streams=True) as callers:
        await Traffic(model, callers, doubled(chance, 12), chance, pause_s=0.001).run()


@pytest.mark.parametrize("service", ["executor", "gateway"])
@pytest.mark.parametrize("model", CALLERS)
async def test_a_called_sequence_counts_each_step_once_though_a_process_is_killed(
    shared: RunningMesh, model: str, service: str
) -> None:
    chance = random.Random(9)
    async with Callers(shared) as callers:
        traffic = Traffic(model, callers, doubled(chance, 16, longest=12), chance, retries=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            for share, name in zip((0.2, 0.5), shared.names(service), strict=False):
                await traffic.progress(share)
                shared.send(name, signal.SIGKILL)
    wait(lambda: len(shared.alive()) == 2, "executors are back")
    wait(lambda: shared.is_ready(0) and shared.is_ready(1), "gateways are back")
    wait(lambda: not shared.slots_held("running_sum"), "no slot is held")


async def test_a_called_sequence_counts_each_step_once_though_instances_of_its_callers_are_killed(
    shared: RunningMesh,
) -> None:
    """Nothing but the instances: nobody hears of it, and no step runs twice for the sequence that is called."""
    chance = random.Random(11)
    async with Callers(shared) as callers, asyncio.TaskGroup() as group:
        traffics = [Traffic(model, callers, doubled(chance, 8, longest=12), chance) for model in CALLERS[2:]]
        for traffic in traffics:
            group.create_task(traffic.run())
        for share in (0.2, 0.4, 0.6):
            for traffic in traffics:
                # A request whose process ends twice fails.
                await traffic.settled()
                await traffic.progress(share)
            for executor in shared.names("executor"):
                for process in instances_of(shared, executor):
                    process.kill()
    assert [0] * len(traffics) == [traffic.repeated for traffic in traffics]


def test_wherever_the_caller_s_process_dies_its_calls_are_not_made_twice(shared: RunningMesh) -> None:
    """A place before the first call, between them, and behind the last; in a step in the middle and in the last one."""
    values = [5, 1000, 1011, 1022, 6, 1032]
    last = len(values) - 1

    answers = [
        infer(shared, "twice_dying", value, sequence_id=3, sequence_start=step == 0, sequence_end=step == last)
        for step, value in enumerate(values)
    ]

    assert Doubled(3, tuple(values)).sums == answers
    # Its number tells how many steps the called sequence was given.
    assert str(2 * len(values)) == shared.record(sequence_id("running_sum", "", 7))[ACCEPTED]
    wait(lambda: len(shared.alive()) == 2, "executors are back")


def test_a_start_that_runs_again_with_further_calls_does_not_begin_its_sequence_again(shared: RunningMesh) -> None:
    answers = [
        infer(shared, "twice_dying", 1002, sequence_id=4, sequence_start=True),
        infer(shared, "twice_dying", 5, sequence_id=4, sequence_end=True),
    ]

    assert [2004, 2014] == answers
    # Both calls of the first step were made twice, and counted once.
    assert "4" == shared.record(sequence_id("running_sum", "", 7))[ACCEPTED]
    wait(lambda: len(shared.alive()) == 2, "executors are back")


def test_a_step_that_runs_again_and_computes_other_bits_repeats_its_calls_all_the_same(shared: RunningMesh) -> None:
    """As a model may on another GPU, or in another batch. The sequence that is called has what was computed first."""
    first = infer(shared, "twice_otherwise", 1000, sequence_id=6, sequence_start=True)
    then = infer(shared, "twice_otherwise", 1011, sequence_id=6)
    last = infer(shared, "twice_otherwise", 1022, sequence_id=6, sequence_end=True)

    assert "6" == shared.record(sequence_id("running_sum", "", 7))[ACCEPTED]
    # Of the first step all was sent after the death, of the second one a half, of the third one nothing.
    assert [2002, 2002 + 2023, 2002 + 2023 + 2044] == [first, then, last]
    wait(lambda: len(shared.alive()) == 2, "executors are back")


def test_executors_that_stop_finish_the_calls_of_their_models(shared: RunningMesh) -> None:
    with ThreadPoolExecutor(1) as pool:
        infer(shared, "knot_a", 1)
        answer = pool.submit(infer, shared, "knot_a", 1)
        time.sleep(0.1)  # it runs, and will make its call when the executors stop already
        before = {one.executor for one in shared.alive()}
        for name in shared.names("executor"):
            shared.send(name, signal.SIGTERM)

        assert 1 == answer.result()
    wait(lambda: len({one.executor for one in shared.alive()} - before) == 2, "executors are back")
    assert not any("drain timed out" in shared.log(name) for name in shared.names("executor"))


def test_calls_within_calls(shared: RunningMesh) -> None:
    assert 3 == infer(shared, "knot_a", 3)


@pytest.mark.parametrize(("first", "second"), KNOTS)
def test_a_request_that_needs_more_instances_than_there_are_fails_and_names_the_cycle(
    shared: RunningMesh, first: str, second: str
) -> None:
    with pytest.raises(InferenceServerException) as failed:
        infer(shared, first, 8)

    assert "deadlock: " in str(failed.value.message())
    circles = f"{first} -> {second} -> {first}", f"{second} -> {first} -> {second}"
    assert any(circle in str(failed.value.message()) for circle in circles)
    assert 2 == infer(shared, second, 2)


@pytest.mark.parametrize("knot", KNOTS)
def test_independent_requests_that_take_each_others_instances_are_all_answered(
    shared: RunningMesh, knot: tuple[str, str]
) -> None:
    """Each of them needs one instance of both models. All four instances are taken at once, and all wait."""

    def outcome(model: str) -> int | str:
        try:
            return infer(shared, model, 1)
        except InferenceServerException as error:
            return str(error.message())

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(outcome, knot * 4))

    assert all(answer == 1 or "deadlock: " in str(answer) for answer in answers), answers
    assert 1 in answers
    assert 1 == infer(shared, knot[0], 1)
