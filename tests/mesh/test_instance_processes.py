"""Instances that are processes: what ends one of them hurts no other, and no sequence whose state the mesh holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import (
    HANGS,
    METHODICAL_MODEL,
    add_forgetful_model,
    add_hanging_models,
    add_patient_model,
    add_streaming_models,
    add_sum_model,
    put_in_processes,
)
from tests.mesh.running_mesh import RunningMesh, eventually, instances_of
from tests.mesh.streams import VALUES, Reader
from tests.mesh.traffic import Callers, Step, Traffic, make_plans, refused, tensor

LIMIT_S = 2
"""Longer than a busy machine keeps a batch that does not hang."""
KILLS = 8
PER_KIND = 3
"""Sequences at once, of each kind of model."""


@pytest.mark.timeout(240)
async def test_sums_are_right_and_nobody_hears_of_it_though_processes_of_instances_are_killed(
    make_mesh: MakeMesh, tmp_path: Path, chance: random.Random
) -> None:
    """With declared state (also with rare checkpoints, and by response senders), with methods, and with replay."""
    repository = tmp_path / "models"
    models = [
        add_sum_model(repository, "running_sum"),
        add_sum_model(repository, "rarely_kept_sum", checkpoint_interval=7),
        add_sum_model(repository, "sent_sum", sends=True),
        add_forgetful_model(repository, "methodical_sum", source=METHODICAL_MODEL),
        add_forgetful_model(repository, "replayed_sum", recovery="replay"),
    ]
    put_in_processes(repository, *models)
    mesh = make_mesh(models=[repository], executors=1)
    executor = mesh.pid("executor-1")
    over = asyncio.Event()
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffics = [
            Traffic(model, callers, make_plans(chance, PER_KIND, shortest=20, longest=40), chance) for model in models
        ]
        for traffic in traffics:
            group.create_task(traffic.run_until(over))
        await eventually(lambda: all(traffic.answered > 10 for traffic in traffics), "all are played")
        for _ in range(KILLS):
            answered = [traffic.answered for traffic in traffics]
            chance.choice(await eventually(lambda: instances_of(mesh) or None, "processes run")).kill()
            await eventually(
                lambda before=answered: all(
                    traffic.answered > count + 3 for traffic, count in zip(traffics, before, strict=True)
                ),
                "all are played on",
            )
            # A request whose process ends twice fails.
            for traffic in traffics:
                await traffic.settled()
        over.set()
    assert [0] * len(traffics) == [traffic.repeated for traffic in traffics]
    assert executor == mesh.pid("executor-1")
    assert mesh.log("executor-1").count("was killed by SIGKILL") >= KILLS
    pids = [process.pid for process in instances_of(mesh)]
    assert len(models) == len(pids)

    os.kill(executor, signal.SIGKILL)
    await eventually(lambda: not any(map(psutil.pid_exists, pids)), "its processes end with it")


@pytest.mark.timeout(240)
async def test_what_hangs_or_ends_an_instance_leaves_its_neighbours_alone(
    make_mesh: MakeMesh, tmp_path: Path, chance: random.Random
) -> None:
    """A call that never returns ends its process after `--batch-limit-s`, even if it holds the interpreter; the
    executor stays, and so does what another instance keeps in its own process."""
    repository = tmp_path / "models"
    add_hanging_models(repository, "nobody")
    forgetful = add_forgetful_model(repository)
    beside = add_sum_model(repository, "beside")
    put_in_processes(repository, "running_sum", "add_sub")
    put_in_processes(repository, forgetful, instances=2)
    mesh = make_mesh(models=[repository], executors=1, environment={"SEQMESH_BATCH_LIMIT_S": str(LIMIT_S)})
    over = asyncio.Event()
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(beside, callers, make_plans(chance, 3), chance)
        group.create_task(traffic.run_until(over))
        assert 5 == await callers[0]("running_sum", Step("poisoned", 5, start=True))
        assert 7 == await callers[0]("running_sum", Step("neighbour", 7, start=True))
        hung = f"did not come back within {LIMIT_S} s and was ended while it ran this request, for the second time"
        assert hung in await refused(callers[0]("running_sum", Step("poisoned", HANGS)))
        assert 6 == await callers[0]("running_sum", Step("poisoned", 1, end=True)), "the step changed nothing"
        assert 8 == await callers[0]("running_sum", Step("neighbour", 1, end=True))

        for number in (1, 2):
            assert number == await callers[0](forgetful, Step(f"own {number}", number, start=True))
        one_of_them = await only_one_lost(mesh, callers[0], forgetful)
        over.set()
    assert one_of_them
    assert [] == mesh.deaths()
    assert "most recent call first" in mesh.log("executor-1"), "where it hung"


async def only_one_lost(mesh: RunningMesh, call: Any, forgetful: str) -> bool:
    """Kills the instances' processes one by one, until one of two sequences has lost its state; whether the other has
    not.
    """
    for process in instances_of(mesh):
        process.kill()
        lost = 0
        for number in (1, 2):
            try:
                await call(forgetful, Step(f"own {number}", 0))
            except InferenceServerException as refusal:
                lost += "only that process held the sequence's state" in str(refusal)
        if lost:
            return lost == 1
    return False


@pytest.mark.timeout(240)
async def test_a_model_stops_when_the_caller_of_a_step_has_gone(make_mesh: MakeMesh, tmp_path: Path) -> None:
    """In the executor's process or its own. A step that it ends with an error changes nothing of the sequence."""
    repository = tmp_path / "models"
    models = [add_patient_model(repository, name, tmp_path / name) for name in ("patient", "patient_process")]
    put_in_processes(repository, "patient_process")
    mesh = make_mesh(models=[repository], executors=1)
    async with grpc_aio.InferenceServerClient(mesh.grpc()) as client:
        for model in models:
            assert 5 == await send(client, model, 5, sequence_start=True)
            waiting = asyncio.create_task(send(client, model, HANGS))
            await eventually((tmp_path / model).exists, "the step runs")
            waiting.cancel()
            assert 7 == await send(client, model, 2, sequence_end=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sequence", [True, False])
async def test_every_answer_comes_once_though_instances_are_killed_in_the_middle_of_them(
    make_mesh: MakeMesh, tmp_path: Path, *, sequence: bool
) -> None:
    repository = tmp_path / "models"
    add_streaming_models(repository)
    put_in_processes(repository, "streamed_count", "streamed_sum")
    mesh = make_mesh(models=[repository], executors=1)
    executor = mesh.pid("executor-1")
    readers = [Reader(f"read {number}") for number in range(PER_KIND)]
    async with asyncio.TaskGroup() as group:
        for reader in readers:
            steps = [reader.step(index, sequence=sequence) for index in range(len(VALUES) if sequence else 1)]
            group.create_task(reader.read(mesh.grpc(), *steps))
        for count in (10, 30):
            await eventually(lambda count=count: all(len(reader.got) > count for reader in readers), "answers come")
            for process in instances_of(mesh):
                process.kill()

    for reader in readers:
        assert list(range(1, (sum(VALUES) if sequence else VALUES[0]) + 1)) == reader.got
    assert executor == mesh.pid("executor-1")


async def send(client: Any, model: str, value: int, **flags: bool) -> int:
    """One step of a sequence, without a request id: it is given up when its caller leaves."""
    answer = await client.infer(model, [tensor(grpc_aio.InferInput, value)], sequence_id=7, **flags)
    return int(answer.as_numpy("OUTPUT").item())
