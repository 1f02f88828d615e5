"""PyTorch files as people have them, without a signature of ours, on a mesh of real processes.

The modules keep their state in themselves, as the third of the documents that started the project describes it.
"""

from __future__ import annotations

import random
import shutil
from asyncio import TaskGroup
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import tritonclient.grpc as grpcclient

from executor.engine.pytorch.signature import script_deprecation_ignored
from tests.executor.engine import keeping_modules
from tests.mesh.conftest import wait_until_equal
from tests.mesh.raw_http import post
from tests.mesh.running_mesh import RunningMesh, running_mesh
from tests.mesh.traffic import Callers, Traffic, make_plans

SEEDS = Path(__file__).resolve().parents[1] / "fixtures" / "seeds"
SUMS = ("scripted_sum", "traced_sum", "sum_from_none")
SESSION = "inference-session-id"
CONFIG = """
name: "{name}"
platform: "pytorch_libtorch"
max_batch_size: 8
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
sequence_batching {{ {strategy} max_sequence_idle_microseconds: 60000000 }}
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
"""

# On a busy machine two executors need a minute to import torch, for whichever test comes first and after each kill.
pytestmark = pytest.mark.timeout(300)


def save(module: torch.nn.Module, directory: Path, *, traced: bool = False) -> None:
    """As people save: `torch.jit.save`, and nothing of ours."""
    (directory / "1").mkdir(parents=True)
    with script_deprecation_ignored():
        example = torch.zeros(1, 1, dtype=torch.int32)
        jit = cast("Any", torch.jit)
        saved = jit.trace(module.eval(), example) if traced else jit.script(module)
        jit.save(saved, str(directory / "1" / "model.pt"))


@pytest.fixture(scope="module")
def module_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    directory = tmp_path_factory.mktemp("torch-files")
    repository = directory / "models"
    save(keeping_modules.Sum(), repository / "scripted_sum")
    save(keeping_modules.SumInPlace(), repository / "traced_sum", traced=True)
    save(keeping_modules.SumFromNone(), repository / "sum_from_none")
    for name, strategy in zip(SUMS, ("direct { }", "oldest { }", "direct { }"), strict=True):
        (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, strategy=strategy))
    save(keeping_modules.Numbers(16), repository / "rnn_model")
    shutil.copy(SEEDS / "rnn_model.pbtxt", repository / "rnn_model" / "config.pbtxt")
    with running_mesh(directory / "data", [repository], gateways=2, executors=2) as mesh:
        yield mesh


@pytest.fixture
def mesh(module_mesh: RunningMesh) -> Iterator[RunningMesh]:
    mesh = module_mesh
    tracebacks = mesh.tracebacks()
    yield mesh
    assert tracebacks == mesh.tracebacks()
    wait_until_equal([0, 0, 0], lambda: [mesh.slots_held(model) for model in SUMS], "slots held")
    wait_until_equal([], mesh.leaks, "keys left without TTL")


async def test_sums_are_right_though_executors_are_killed_in_the_middle(
    mesh: RunningMesh, chance: random.Random
) -> None:
    """Over HTTP and gRPC, in batches of many sequences, on two instances of two executors."""
    async with Callers(mesh) as callers, TaskGroup() as group:
        traffics = [Traffic(model, callers, make_plans(chance, 12, shortest=15, longest=30), chance) for model in SUMS]
        for traffic in traffics:
            group.create_task(traffic.run())
        for share, name in ((0.3, "executor-1"), (0.6, "executor-2")):
            for traffic in traffics:
                await traffic.progress(share)
            await mesh.kill_executor(name)

    assert [0] * len(SUMS) == [traffic.repeated for traffic in traffics]


def numbers(*values: int, **parameters: Any) -> dict[str, Any]:
    data = {"name": "sequence", "shape": [1, len(values)], "datatype": "INT32", "data": list(values)}
    return {"inputs": [data], **({"parameters": parameters} if parameters else {})}


def undisturbed(*pieces: list[int]) -> list[Any]:
    """What a module of its own says to the pieces of one session."""
    module = keeping_modules.Numbers(16)
    with torch.inference_mode():
        return [pytest.approx(module(torch.tensor([piece]))[0].tolist(), abs=1e-5) for piece in pieces]


def test_the_third_documents_configuration_serves_an_ordinary_file_session_by_session(mesh: RunningMesh) -> None:
    path = "/v2/models/rnn_model/versions/1/infer"
    sessions = {"session_abc": [[1, 2, 3], [4, 5]], "session_def": [[15, 14, 13], [12]]}

    said: dict[str, list[Any]] = {session: [] for session in sessions}
    for step in range(2):
        for session, pieces in sessions.items():
            response = post(mesh.http(step), path, numbers(*pieces[step]), {SESSION: session})
            assert 200 == response.status, response.error
            said[session].append(response.document["outputs"][0]["data"])

    for session, pieces in sessions.items():
        assert undisturbed(*pieces) == said[session]
        ended = post(mesh.http(), path, numbers(0, sequence_id=session, sequence_end=True))
        assert 200 == ended.status


def test_the_configuration_shows_what_was_found_in_the_file(mesh: RunningMesh) -> None:
    with grpcclient.InferenceServerClient(mesh.grpc()) as client:
        config = cast("Any", client).get_model_config("rnn_model", as_json=True)["config"]

    assert [{"name": "sequence", "data_type": "TYPE_INT32", "dims": ["-1"]}] == config["input"]
    states = config["sequence_batching"]["state"]
    assert [("hidden_state", ["4"])] == [(state["input_name"], state["dims"]) for state in states]
