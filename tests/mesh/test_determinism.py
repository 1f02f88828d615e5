"""Real processes, a model of floating-point numbers: with `fixed_shape` a sequence's answers are the same, bit by bit,
alone and among others, in any slot, after a takeover, and beside sequences of NaN. And models of the other runtimes,
whose sums are right after a takeover.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http.aio as http_aio

from tests.executor.engine.model_workshop import Workshop
from tests.executor.engine.torch_modules import Gated
from tests.mesh.model_repository import SESSION_SUMS, add_session_models
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh
from tests.mesh.traffic import Callers, Traffic, make_plans

MODEL = "gated"
STEPS = 24
BACKEND_PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "backend"
SUMS = (*SESSION_SUMS, "leaky_sum")
CONFIG = """
name: "gated"
backend: "pytorch"
max_batch_size: 6
input { name: "x" data_type: TYPE_FP32 dims: 5 }
output { name: "y" data_type: TYPE_FP32 dims: 3 }
instance_group { kind: KIND_AUTO }
sequence_batching {
  direct { }
  max_sequence_idle_microseconds: 60000000
  state { input_name: "h" output_name: "h_next" data_type: TYPE_FP32 dims: 21 }
  state { input_name: "c" output_name: "c_next" data_type: TYPE_FP32 dims: 21 }
}
parameters { key: "fixed_shape" value { string_value: "true" } }
parameters { key: "checkpoint_interval" value { string_value: "3" } }
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two executors of six slots each, in which the backend of examples/backend is installed."""
    directory = tmp_path_factory.mktemp("determinism")
    workshop = Workshop(directory / "models")
    torch.manual_seed(7)
    workshop.script(MODEL, Gated())
    (directory / "models" / MODEL / "config.pbtxt").write_text(CONFIG)
    add_session_models(directory / "models")
    site = installed(BACKEND_PACKAGE, directory)
    with running_mesh(
        directory / "data",
        [directory / "models", BACKEND_PACKAGE / "models"],
        executors=2,
        environment={"PYTHONPATH": str(site)},
    ) as mesh:
        yield mesh


def installed(package: Path, directory: Path) -> Path:
    """Installs a package as its user would, into a folder of its own. pip builds beside the sources, so in a copy."""
    source, site = directory / "source", directory / "site"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--no-index", f"--target={site}", source], check=True)
    return site


class Caller:
    """Plays sequences over HTTP, and keeps what they are answered."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.steps = 0

    async def play(self, name: str, inputs: Sequence[np.ndarray[Any, Any]]) -> list[bytes]:
        """One whole sequence; its answers' bytes."""
        answers: list[bytes] = []
        for number, values in enumerate(inputs):
            x = http_aio.InferInput("x", [1, 5], "FP32")
            x.set_data_from_numpy(values)
            result = await self._client.infer(
                MODEL,
                [x],
                sequence_id=name,
                sequence_start=number == 0,
                sequence_end=number == len(inputs) - 1,
            )
            answers.append(result.as_numpy("y").tobytes())
            self.steps += 1
        return answers

    async def progress(self, steps: int) -> None:
        """Returns when so many steps have been answered."""
        while self.steps < steps:
            await asyncio.sleep(0.01)


def inputs_of(seed: int, *, poisoned: bool = False) -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    values = [chance.standard_normal((1, 5)).astype(np.float32) for _ in range(STEPS)]
    for number in range(1, STEPS, 4) if poisoned else ():
        values[number][0, number % 5] = (np.nan, np.inf)[number // 4 % 2]
    return values


@pytest.mark.timeout(300)  # on a busy machine two executors need a minute to import torch
async def test_answers_have_the_same_bits_alone_in_company_after_a_takeover_and_beside_nan(
    mesh: RunningMesh, chance: random.Random
) -> None:
    for name in mesh.names("executor"):
        said = f"fixed shape service={name} model=gated instance=gated_0_0 rows=64 tested=True"
        await eventually(lambda name=name, said=said: said in mesh.log(name), f"{name} has loaded the model")
    tested = range(8)
    async with http_aio.InferenceServerClient(mesh.http(), conn_limit=64) as client:
        caller = Caller(client)
        alone = {seed: await caller.play(f"alone {seed}", inputs_of(seed)) for seed in tested}

        caller = Caller(client)
        played: dict[int, asyncio.Task[list[bytes]]] = {}
        # More sequences than slots, so that some wait for slots that poisoned ones have left.
        async with asyncio.TaskGroup() as group:
            seeds = [*tested, *range(100, 108)]
            chance.shuffle(seeds)
            for seed in seeds:
                inputs = inputs_of(seed, poisoned=seed >= 100)
                played[seed] = group.create_task(caller.play(f"together {seed}", inputs))
            await caller.progress(len(seeds) * STEPS // 3)
            mesh.kill(chance.choice(mesh.names("executor")))

    for seed in tested:
        assert alone[seed] == played[seed].result()
    assert all(np.isfinite(np.frombuffer(answer, "<f4")).all() for seed in tested for answer in alone[seed])
    assert not np.isfinite(np.frombuffer(played[100].result()[-1], "<f4")).any()


@pytest.mark.timeout(300)
async def test_sums_of_every_runtime_are_right_and_nobody_sees_an_error_though_an_executor_is_killed(
    mesh: RunningMesh, chance: random.Random
) -> None:
    """And of a backend that another package adds. Their configurations name neither inputs nor outputs: the models say
    them.
    """
    executors = mesh.names("executor")
    await eventually(lambda: len(mesh.alive()) == len(executors), "both executors serve")
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffic = [Traffic(model, callers, make_plans(chance, 24, shortest=20, longest=40), chance) for model in SUMS]
        for each in traffic:
            group.create_task(each.run())
        for each in traffic:
            await each.progress(0.3)
        mesh.kill(chance.choice(executors))

    assert [0] * len(SUMS) == [each.repeated for each in traffic]
