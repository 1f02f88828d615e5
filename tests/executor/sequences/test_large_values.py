"""A Redis that takes no large values: a step whose state or answer is too large fails by itself, in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from executor.engine.python import outputs
from executor.engine.python.slot_states import SlotStates
from executor.engine.python.tensor import ModelTensor
from executor.engine.pytorch import running_batch
from executor.engine.pytorch.arena import StateArena
from executor.engine.pytorch.running_batch import HostBatch
from shared.contract.errors import Code, LoadError
from shared.contract.ids import CorrelationId
from shared.contract.messages import ReplyMessage, StepFlag
from shared.contract.model_config import StateSpec, TensorSpec
from shared.contract.tensors import to_numpy
from shared.store.connections.fitness import ENVELOPE_BYTES, value_bytes_max
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis
from tests.executor.living import SHARDS, living
from tests.executor.patience import PATIENCE_S
from tests.scripted_mesh import ScriptedMesh

PREFIX = "large"
VALUE_BYTES = 1 << 20
"""The smallest bound that Redis can be given."""

HOARDER = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Keeps as many bytes as it is told to, and answers with as many as it is told to, after how many it had."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        kept, said = pb_utils.get_input_tensor_by_name(request, "SIZES").as_numpy()[0].tolist()
        before = pb_utils.get_input_tensor_by_name(request, "HOARD").as_numpy().size
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("BEFORE", np.array([[before]], np.int32)),
            pb_utils.Tensor("SAID", np.zeros((1, said), np.uint8)),
            pb_utils.Tensor("HOARD_OUT", np.zeros((1, kept), np.uint8)),
        ])
'''
CONFIG = """
name: "hoarder"
backend: "python"
max_batch_size: 4
input [ { name: "SIZES" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "BEFORE" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "SAID" data_type: TYPE_UINT8 dims: [ -1 ] } ]
sequence_batching {
  direct { }
  max_sequence_idle_microseconds: 600000000
  state [ { input_name: "HOARD" output_name: "HOARD_OUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
}
"""


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Any]:
    redis = cast("Any", connect(private_server.url))
    await redis.config_set("proto-max-bulk-len", VALUE_BYTES)
    yield redis
    await redis.aclose()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "hoarder" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HOARDER)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


async def test_what_redis_does_not_take_fails_one_step_and_keeps_the_state(
    redis: Any, private_server: EmbeddedRedis, models: Path
) -> None:
    mesh = ScriptedMesh(redis, Keyspace(PREFIX, SHARDS), "hoarder")
    await mesh.open()

    async def answers(*steps: tuple[CorrelationId, int, int], flags: StepFlag = StepFlag.NONE) -> list[ReplyMessage]:
        """Of steps that are sent together: (sequence, bytes to keep, bytes to say)."""
        sent = [mesh.submission(one, {"SIZES": np.array([[kept, said]], np.int32)}, flags) for one, kept, said in steps]
        for submission in sent:
            await mesh.submit(submission)
        for slot, (one, _, _) in enumerate(steps if flags else ()):
            await mesh.assign(one, running.executor, slot=slot)
        async with asyncio.timeout(PATIENCE_S):
            return [await mesh.reply(submission) for submission in sent]

    def before(reply: ReplyMessage) -> int:
        assert "" == reply.error
        return int(to_numpy(reply.outputs[0]).item())

    async with living(private_server.url, PREFIX, models, "hoarder", "a") as running:
        await answers((7, 100, 0), (8, 200, 0), flags=StepFlag.START)

        kept, beside = await answers((7, 2 * VALUE_BYTES, 0), (8, 300, 0))
        assert (Code.INTERNAL, 200) == (kept.error_code, before(beside))
        assert f"wrong state 'HOARD_OUT': it has {2 * VALUE_BYTES} bytes, and Redis" in kept.error
        assert f"no value beyond {VALUE_BYTES - ENVELOPE_BYTES} (proto-max-bulk-len)" in kept.error

        said, beside = await answers((7, 400, 2 * VALUE_BYTES), (8, 500, 0))
        assert (Code.INTERNAL, 300) == (said.error_code, before(beside))
        assert f"takes {VALUE_BYTES - ENVELOPE_BYTES}" in said.error

        assert [400, 500] == [before(reply) for reply in await answers((7, 900_000, 900_000), (8, 0, 0))]
        # As large as it may be, it is found by the next owner, too.
        async with living(private_server.url, PREFIX, models, "hoarder", "b") as next_owner:
            await mesh.vacate(7, moving=True)
            await mesh.assign(7, next_owner.executor)
            assert [900_000] == [before(reply) for reply in await answers((7, 0, 0))]


def test_a_state_of_fixed_size_that_redis_does_not_take_is_not_loaded(tmp_path: Path) -> None:
    spec = StateSpec("HOARD", "HOARD_OUT", "FP32", (10, 10))
    SlotStates([spec], tmp_path, 400)
    StateArena([spec], 1, tmp_path, torch.device("cpu"), 400)

    with pytest.raises(LoadError, match="state 'HOARD' cannot be kept: it has 400 bytes, and Redis"):
        SlotStates([spec], tmp_path, 399)
    with pytest.raises(LoadError, match="state 'HOARD' cannot be kept: it has 400 bytes, and Redis"):
        StateArena([spec], 1, tmp_path, torch.device("cpu"), 399)


@pytest.mark.parametrize(("datatype", "row"), [("FP32", torch.zeros(1, 25)), ("BYTES", ["ä" * 47, ""])])
def test_a_state_of_variable_size_is_measured_before_it_is_kept(tmp_path: Path, datatype: str, row: Any) -> None:
    spec = StateSpec("HOARD", "HOARD_OUT", datatype, (-1,))
    size = 100 if datatype == "FP32" else 102

    (fits,) = StateArena([spec], 1, tmp_path, torch.device("cpu"), size).states
    (narrow,) = StateArena([spec], 1, tmp_path, torch.device("cpu"), size - 1).states

    assert fits.problem(row, 1) is None
    assert f"it has {size} bytes" in str(narrow.problem(row, 1))


def test_what_is_refused_by_its_size_is_not_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of some GiB keeps the interpreter for longer than the lease lasts."""
    for module in (outputs, running_batch):
        monkeypatch.setattr(module, "VALUE_BYTES_MAX", 8)
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    check = outputs.OutputCheck("m", TensorSpec("OUT", "FP32", (2,)), batched=True)

    given = [check.wire(ModelTensor("OUT", rows), len(rows)).raw for rows in (array[:1], array, array[::2])]
    cut = HostBatch().pieces(torch.from_numpy(array), 3, [(0, 1), (0, 3)])

    assert [bytes, memoryview, memoryview] == [type(raw) for raw in given]
    assert [bytes, memoryview] == [type(raw) for raw in cut]
    assert [rows.tobytes() for rows in (array[:1], array, array[::2])] == [bytes(raw) for raw in given]
    array[:] = 0
    assert array.tobytes() == bytes(given[1]) == bytes(cut[1])


async def test_a_server_that_may_not_be_asked_counts_as_usual(redis: Any, private_server: EmbeddedRedis) -> None:
    assert VALUE_BYTES - ENVELOPE_BYTES == await value_bytes_max(redis)
    await redis.config_set("proto-max-bulk-len", 512 << 20)
    assert 500 << 20 == await value_bytes_max(redis)

    await redis.acl_setuser("quiet", enabled=True, passwords=["+s"], categories=["+@all"], commands=["-config"])
    quiet = connect(f"redis://quiet:s@{private_server.address}/0")
    assert 500 << 20 == await value_bytes_max(quiet)
    await quiet.aclose()
