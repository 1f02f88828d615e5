"""A GPU that computes nothing more for a process: the process ends, and nobody is answered by what is left of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from shared.contract.limits import LOST_OWNERS_MAX
from tests.executor.engine.model_workshop import Workshop
from tests.executor.engine.torch_modules import Vocabulary
from tests.mesh.conftest import MakeMesh
from tests.mesh.model_repository import LOSES_GPU, add_model_that_loses_its_gpu
from tests.mesh.running_mesh import eventually
from tests.mesh.traffic import Callers, Step, Traffic, make_plans


@pytest.mark.timeout(240)
async def test_when_a_gpu_is_lost_other_executors_go_on_and_no_caller_hears_of_it(
    make_mesh: MakeMesh, tmp_path: Path, chance: random.Random
) -> None:
    """The GPU is one in name only, its loss is not: all calls of the process fail from then on."""
    name = add_model_that_loses_its_gpu(tmp_path / "models", tmp_path / "lost")
    mesh = make_mesh(models=[tmp_path / "models"], executors=2, environment={"SEQMESH_GPU": "0"})
    over = asyncio.Event()
    async with Callers(mesh) as callers, asyncio.TaskGroup() as group:
        traffic = Traffic(name, callers, make_plans(chance, 6), chance)
        group.create_task(traffic.run_until(over))
        await eventually(lambda: traffic.answered > 10, "its neighbours are played")

        assert 5 == await callers[0](name, Step("fatal", 5, start=True))
        assert 5 + LOSES_GPU == await callers[0](name, Step("fatal", LOSES_GPU))

        await traffic.more(50)
        over.set()
        assert 6 + LOSES_GPU == await callers[0](name, Step("fatal", 1, end=True))
    assert (tmp_path / "lost").exists()
    assert traffic.repeated == 0
    await eventually(lambda: len(mesh.alive()) == 2, "both executors are back")
    logs = mesh.log("executor-1") + mesh.log("executor-2")
    assert logs.count("GPU lost, giving the lease up") == 1
    assert "cuda:0: CUDA error: device-side assert triggered" in logs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(240)
async def test_a_kernel_that_fails_costs_its_own_sequence_and_no_other(make_mesh: MakeMesh, tmp_path: Path) -> None:
    """A real one: a word that is in no vocabulary. Every executor that tries the step loses its GPU to it."""
    Workshop(tmp_path / "models").script("words", Vocabulary())
    (tmp_path / "models" / "words" / "config.pbtxt").write_text(
        """
        name: "words" backend: "pytorch" max_batch_size: 8
        input { name: "x" data_type: TYPE_INT64 dims: 1 }
        output { name: "y" data_type: TYPE_FP32 dims: 1 }
        instance_group { kind: KIND_GPU }
        sequence_batching {
          max_sequence_idle_microseconds: 300000000
          oldest { max_candidate_sequences: 8 }
          state { input_name: "total" output_name: "total_next" data_type: TYPE_FP32 dims: 1 }
        }
        """
    )
    mesh = make_mesh(models=[tmp_path / "models"], executors=2)
    async with http_aio.InferenceServerClient(mesh.http(), conn_timeout=200) as client:
        numbers = itertools.count()

        async def say(sequence: int, word: int, *, start: bool = False, end: bool = False) -> float:
            x = http_aio.InferInput("x", [1, 1], "INT64")
            x.set_data_from_numpy(np.array([[word]], dtype=np.int64))
            result = await client.infer(
                "words",
                [x],
                sequence_id=sequence,
                sequence_start=start,
                sequence_end=end,
                request_id=str(next(numbers)),
            )
            return float(cast("Any", result).as_numpy("y").item())

        async def spell(sequence: int) -> list[float]:
            """Steps until the fatal one has been given up, and one more."""
            sums = [await say(sequence, 1, start=True)]
            while not given_up.done():
                sums.append(await say(sequence, 1))
            return [*sums, await say(sequence, 1, end=True)]

        usage = (await client.get_inference_statistics("words"))["model_stats"][0]["memory_usage"]
        assert "GPU" in {use["type"] for use in usage}
        assert 1 == await say(99, 1, start=True)
        given_up = asyncio.ensure_future(say(99, 10))
        spelled = asyncio.gather(*(spell(sequence) for sequence in range(1, 7)))
        with pytest.raises(InferenceServerException, match=f"given up: {LOST_OWNERS_MAX} executors"):
            await given_up
        for sums in await spelled:
            assert [float(number) for number in range(1, len(sums) + 1)] == sums
    logs = mesh.log("executor-1") + mesh.log("executor-2")
    assert LOST_OWNERS_MAX == logs.count("GPU lost, giving the lease up")
