"""A whole repository as a team of Triton users has it: every kind of model, some without a configuration. All become
ready, are called over HTTP and gRPC, and answer right while an executor is killed in the middle.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from tests.executor.engine import keeping_modules, onnx_models
from tests.mesh.calling_models import HEAD
from tests.mesh.ensemble_models import EnsembleSource, add_example
from tests.mesh.model_repository import (
    SAMPLES,
    SESSION_SUMS,
    add_iterative_model,
    add_session_models,
    add_streaming_models,
)
from tests.mesh.running_mesh import RunningMesh, running_mesh, wait
from tests.mesh.streams import VALUES, Reader
from tests.mesh.test_torch_files import CONFIG, save
from tests.mesh.traffic import Callers, Plan, Traffic, make_plans

AUTO_COMPLETED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.add_input({"name": "INPUT", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [2]})
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT", given * 2)]))
        return responses
"""
CALLER_CONFIG = """
name: "caller"
backend: "python"
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1, 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1, 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
CALLER = f"""{HEAD}
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        # The whole sequence of another model, in one request.
        first, last = (
            pb_utils.InferenceRequest(
                model_name="pipeline",
                requested_output_names=["OUTPUT"],
                inputs=[tensor("INPUT", number(request))],
                correlation_id=9,
                flags=flag,
            ).exec()
            for flag in (
                pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
                pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
            )
        )
        return pb_utils.InferenceResponse([tensor("OUTPUT", value_of(first) + value_of(last))])
"""
TORCH_CONFIG = """
name: "scaled"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100 }
instance_group [ { count: 2 kind: KIND_CPU } ]
"""


class Scaled(torch.nn.Module):
    """Three times the input."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 3


@dataclass(frozen=True)
class Stateless:
    """A model whose requests have nothing to do with each other. right: the answer to an input"""

    name: str
    right: Callable[[Any], Any]
    given: str = "INPUT"
    made: str = "OUTPUT"
    datatype: str = "FP32"
    shape: tuple[int, ...] = (1, 2)


def twice_one_more(value: Any) -> Any:
    """What `caller` adds up: the two sums of a pipeline that gets the same number twice."""
    return 3 * (value + 1)


STATELESS = (
    Stateless("auto_completed", lambda value: value * 2),
    Stateless("scaled", lambda value: value * 3, "INPUT__0", "OUTPUT__0"),
    Stateless("halved", lambda value: value / 2, "x", "y"),
    Stateless("plus_one", lambda value: value + 1, "NUMBER", "NEXT", "INT32", (3, 1)),
    Stateless("caller", twice_one_more, datatype="INT32", shape=(1, 1)),
    Stateless("iterative", lambda value: value, datatype="INT32", shape=(1, 1)),
)


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """A sequence of the ensemble `pipeline`."""

    @property
    def sums(self) -> list[int]:
        return list(itertools.accumulate(value + 1 for value in self.values))


SUMS = ("running_sum", "buffered_sum", "traced_sum", *SESSION_SUMS)
"""Models of sequences: in Python, in PyTorch files that keep state in buffers, in ONNX and the like."""


def team_repository(repository: Path) -> Path:
    """One model of each kind that is not among the samples."""
    for name in ("auto_completed", "halved", "caller"):
        (repository / name / "1").mkdir(parents=True)
    (repository / "auto_completed" / "1" / "model.py").write_text(AUTO_COMPLETED)
    onnx_models.save(
        repository / "halved" / "1" / "model.onnx",
        [onnx_models.node("Mul", ["x", "half"], ["y"])],
        [onnx_models.value("x", onnx_models.FLOAT, [onnx_models.BATCH, 2])],
        [onnx_models.value("y", onnx_models.FLOAT, [onnx_models.BATCH, 2])],
        [onnx_models.constant("half", onnx_models.FLOAT, [], [0.5])],
    )
    (repository / "caller" / "config.pbtxt").write_text(CALLER_CONFIG)
    (repository / "caller" / "1" / "model.py").write_text(CALLER)
    save(Scaled(), repository / "scaled")
    (repository / "scaled" / "config.pbtxt").write_text(TORCH_CONFIG)
    save(keeping_modules.Sum(), repository / "buffered_sum")
    save(keeping_modules.SumInPlace(), repository / "traced_sum", traced=True)
    for name, strategy in (("buffered_sum", "direct { }"), ("traced_sum", "oldest { }")):
        (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, strategy=strategy))
    add_session_models(repository)
    add_streaming_models(repository)
    add_iterative_model(repository, pass_s=0.001)
    add_example(repository)
    EnsembleSource(
        "pipeline",
        [
            ("plus_one", {"NUMBER": "INPUT"}, {"NEXT": "more"}),
            ("running_sum", {"INPUT": "more"}, {"OUTPUT": "OUTPUT"}),
        ],
    ).add(repository)
    return repository


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    models = [SAMPLES, team_repository(tmp_path / "models")]
    with running_mesh(tmp_path / "data", models, gateways=2, executors=2) as mesh:
        yield mesh


async def call(library: Any, client: Any, model: Stateless, chance: random.Random) -> None:
    """One request, whose answer must be right."""
    kind = np.float32 if model.datatype == "FP32" else np.int32
    values = np.array([chance.randint(1, 5) for _ in range(int(np.prod(model.shape)))], kind).reshape(model.shape)
    given = library.InferInput(model.given, list(model.shape), model.datatype)
    given.set_data_from_numpy(values)

    answer = await client.infer(model.name, [given])

    assert model.right(values).tolist() == answer.as_numpy(model.made).tolist(), model.name


async def call_until(mesh: RunningMesh, over: asyncio.Event, chance: random.Random) -> int:
    """Calls all models in turn, over HTTP and gRPC and both gateways; returns how often."""
    rounds = 0
    for library, address in itertools.cycle(((http_aio, mesh.http), (grpc_aio, mesh.grpc))):
        for gateway in range(2):
            async with library.InferenceServerClient(address(gateway)) as client:
                for model in STATELESS:
                    await call(library, client, model, chance)
            rounds += 1
        if over.is_set() and rounds >= 4:
            return rounds
    raise AssertionError("a cycle does not end")


@pytest.mark.timeout(600)
async def test_a_teams_whole_repository_runs_on_though_an_executor_is_killed(
    mesh: RunningMesh, chance: random.Random
) -> None:
    async with http_aio.InferenceServerClient(mesh.http()) as typed:
        client: Any = typed
        index = await client.get_model_repository_index()
    names = {path.name for repository in mesh.models for path in repository.iterdir() if path.is_dir()}
    assert dict.fromkeys(names, "READY") == {line["name"]: line["state"] for line in index}

    over = asyncio.Event()
    readers = [Reader("team"), Reader("team too")]
    async with Callers(mesh, streams=True) as callers:

        def plans() -> list[Plan]:
            return make_plans(chance, 4, shortest=10, longest=16)

        piped: list[Plan] = [PipelinePlan(plan.id, plan.values) for plan in plans()]
        traffics = [Traffic(model, callers, plans(), chance) for model in SUMS]
        traffics.append(Traffic("pipeline", callers, piped, chance))
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(call_until(mesh, over, chance))
            playing = [group.create_task(traffic.run()) for traffic in traffics]
            reading = [
                group.create_task(
                    reader.read(mesh.grpc(place), *(reader.step(index, sequence=True) for index in range(len(VALUES))))
                )
                for place, reader in enumerate(readers)
            ]
            for traffic in traffics:
                await traffic.progress(0.3)
            mesh.send("executor-1", signal.SIGKILL)
            await asyncio.gather(*playing, *reading)
            over.set()

    assert calling.result() >= 4
    assert [list(range(1, sum(VALUES) + 1))] * 2 == [reader.got for reader in readers]
    wait(lambda: not any(mesh.slots_held(model) for model in SUMS), "no slot is held")
    assert [] == mesh.tracebacks()
