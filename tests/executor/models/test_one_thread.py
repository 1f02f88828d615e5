"""All that a python model does, it does on one thread: it may keep what belongs to the thread that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor.engine.base import Row, RowResult
from executor.models.repository import ModelRepository
from executor.workers.devices import Devices
from executor.workers.worker import SavedState
from shared.contract.ids import SlotIndex, sequence_id
from shared.contract.tensors import from_numpy, to_numpy

MODEL = """
import sqlite3

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = sqlite3.connect(":memory:")  # refuses every other thread
        self.kept.execute("CREATE TABLE kept (sequence INTEGER PRIMARY KEY, total INTEGER)")

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        sequence = request.correlation_id()
        value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item())
        before = 0 if request.flags() & 1 else self.total(sequence)
        self.kept.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (sequence, before + value))
        total = np.array([[self.total(sequence)]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])

    def total(self, sequence):
        return self.kept.execute("SELECT total FROM kept WHERE sequence = ?", (sequence,)).fetchone()[0]

    def checkpoint(self, correlation_id):
        return {"total": np.array(self.total(correlation_id))}

    def restore(self, correlation_id, state):
        self.kept.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (correlation_id, int(state["total"])))

    def release(self, correlation_id):
        self.kept.execute("DELETE FROM kept WHERE sequence = ?", (correlation_id,))

    def finalize(self):
        self.kept.close()
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
output [ { name: "OUTPUT", data_type: TYPE_INT32, dims: [ 1 ] } ]
sequence_batching { oldest { max_candidate_sequences: 4 } }
model_warmup [ { name: "one", batch_size: 1, inputs {
  key: "INPUT" value { data_type: TYPE_INT32, dims: [ 1 ], zero_data: true } } } ]
"""


async def test_a_model_may_keep_a_connection_that_belongs_to_its_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = tmp_path / "sums" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    repository = ModelRepository((tmp_path,), Devices())
    (served,) = repository.load("sums").versions
    (worker,) = served.workers

    async def total(value: int, *, start: bool = False) -> RowResult:
        inputs = {"INPUT": from_numpy("INPUT", np.array([[value]], np.int32))}
        row = Row(inputs=inputs, slot=0, start=start, correlation_id=7)
        (result,) = (await worker.run([row], [True])).rows
        assert isinstance(result, RowResult), result
        return result

    first = await total(5, start=True)
    worker.release(sequence_id("sums", "", 7), None)
    refusals = await worker.load([SavedState(SlotIndex(0), 7, {}, first.model_state)])
    assert [None] == list(refusals)
    assert 8 == to_numpy((await total(3)).outputs[0]).item()
    await repository.close()
    assert "failed" not in caplog.text
