"""What happens inside of an instance: warm-up, ragged batches, models that fail before they are ready (triton-spec 1.9,
4, 8).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.conformance.calls import Array, Caller, Step, Stream, neighbours
from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import ModelText
from tests.conformance.targets import Target
from tests.mesh.running_mesh import PATIENCE_S

WARM_UPS = 3


@pytest.mark.differs("Triton's python backend counts warm-up too; a mesh counts what was asked for")
async def test_an_instance_is_warm_before_its_first_request(lone_caller: Caller) -> None:
    caller = lone_caller.of("warmed")
    before = await caller.statistics()  # zeros are left out over gRPC
    uncounted = WARM_UPS if caller.target.is_mesh else 0

    answer = await caller(0, 7)

    assert 7 == answer.total
    assert uncounted + before.get("execution_count", 0) + 1 == answer.seen.call


@pytest.mark.mesh_only("Triton 2.51 does not ask its models whether they are ready")
async def test_a_model_that_says_it_is_not_ready_is_not_and_still_answers(target: Target, caller: Caller) -> None:
    client: Any = caller.client
    away = target.repository / "moody" / f"away_{caller.protocol}"
    assert await client.is_model_ready("moody")

    away.touch()
    try:
        await until_ready(client, expected=False)
        assert 3 == (await caller.of("moody")(0, 3)).total
        assert await client.is_server_ready()
    finally:
        away.unlink()
    await until_ready(client, expected=True)


async def until_ready(client: Any, *, expected: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while expected is not await client.is_model_ready("moody"):
            await asyncio.sleep(0.05)


# -- models that fail -------------------------------------------------------------------------------------------------

TENSORS = """
backend: "python"
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
WARM_UP = """
model_warmup [ { name: "first" batch_size: 1 inputs [
  { key: "INPUT" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "thirteen" } }
] } ]
"""
FAILING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        value = pb_utils.get_input_tensor_by_name(requests[0], "INPUT").as_numpy().item()
        raise RuntimeError(f"cannot do {value:.0f}")
"""
CRASHING = """
import os

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        os.abort()

    def execute(self, requests):
        raise NotImplementedError
"""


# -- ragged -----------------------------------------------------------------------------------------------------------

RAGGED = """
backend: "pytorch"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [
  { name: "doubled" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }
]
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ends" data_type: TYPE_FP32 source_input: "x" },
  { kind: BATCH_ELEMENT_COUNT target_name: "lengths" data_type: TYPE_INT32 source_input: "x" }
]
batch_output [ { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "doubled" source_input: "x" } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 preferred_batch_size: 3 max_queue_delay_microseconds: 100000000 }
  state [ { input_name: "total" output_name: "total_next" data_type: TYPE_FP32 dims: [ 1 ] } ]
}
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


def segments() -> bytes:
    """A TorchScript model that sums each row of a ragged input into its state."""
    import torch  # noqa: PLC0415 - slow to import, and needed here alone

    from executor.engine.pytorch.signature import script_deprecation_ignored  # noqa: PLC0415 - imports torch
    from tests.executor.engine import torch_modules  # noqa: PLC0415 - imports torch
    from tests.executor.engine.model_workshop import scripted  # noqa: PLC0415 - imports torch

    content = io.BytesIO()
    with script_deprecation_ignored():
        torch.jit.save(scripted(torch_modules.Segments()), content)
    return content.getvalue()


def numbers(*values: int) -> Mapping[str, Array]:
    return {"x": np.array([values], np.float32)}


def reason_of(index: Any, model: str) -> str:
    (entry,) = [entry for entry in index if entry["name"] == model]
    assert "UNAVAILABLE" == entry["state"]
    return entry["reason"]


@pytest.mark.mesh_only("the wheel of Triton has no pytorch backend")
async def test_rows_of_any_length_share_a_batch_beside_models_that_cannot_be_loaded(make_target: MakeTarget) -> None:
    """The batch of three waits for ever unless rows of different lengths may share it. The models beside it fail in
    their warm-up, and by a crash while they complete their configuration."""
    target = make_target(
        [
            ModelText("ragged", RAGGED, {"1/model.pt": segments()}),
            ModelText("cold", TENSORS + WARM_UP, {"1/model.py": FAILING, "warmup/thirteen": np.float32(13).tobytes()}),
            ModelText("crashing", TENSORS, {"1/model.py": CRASHING}),
        ]
    )
    ids = neighbours("ragged", 3)
    lengths = [(1, 2, 3), (4,), (5, 6)]

    async with Stream(target, "ragged") as stream:
        for start in (True, False):
            stream.send(
                *(
                    Step(identity, start=start, end=not start, inputs=numbers(*values))
                    for identity, values in zip(ids, lengths, strict=True)
                )
            )
            answers = await stream.answers(3)

            rounds = 1 if start else 2
            assert [[2.0 * value for value in values] for values in lengths] == [
                answer.outputs["doubled"][0].tolist() for answer in answers
            ]
            assert [rounds * sum(values) for values in lengths] == [answer.outputs["sum"].item() for answer in answers]

    async with Caller("http", target, "ragged") as caller:
        batches = (await caller.statistics())["batch_stats"]
        assert [(3, 2)] == [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in batches]
        index = await caller.client.get_model_repository_index()
    cold, crashing = (reason_of(index, model) for model in ("cold", "crashing"))
    assert "failed to run warmup sample 'first': " in cold
    assert "RuntimeError: cannot do 13" in cold
    assert "its process was killed by SIGABRT" in crashing
