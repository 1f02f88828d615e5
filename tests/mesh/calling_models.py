"""Models that call other models, for a test's mesh, and what their sequences are to answer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.mesh.traffic import Plan

TENSORS = """
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SEQUENCES = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 16 }
  state [
    { input_name: "STEPS_IN" output_name: "STEPS_OUT" data_type: TYPE_INT64 dims: [ 1 ]
      initial_state: { name: "none" data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }
  ]
}
"""
HEAD = """
import asyncio
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def number(request):
    return int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item())


def tensor(name, value, datatype=np.int32):
    return pb_utils.Tensor(name, np.array([[value]], datatype))


def value_of(response):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return int(pb_utils.get_output_tensor_by_name(response, "OUTPUT").as_numpy().item())


def call(model, value, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUTPUT"], inputs=[tensor("INPUT", value)], **more
    )

"""
TWICE = """
class TritonPythonModel:
    '''Sends each number twice to the running sum, and answers with what that says to the second one.'''

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        end = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        same = {"correlation_id": request.correlation_id(), "trace": request.trace()}
        value_of(call("running_sum", number(request), flags=start, **same).exec())
        time.sleep(0.004)
        total = value_of(call("running_sum", number(request), flags=end, **same).exec())
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS_IN").as_numpy() + 1
        return pb_utils.InferenceResponse([tensor("OUTPUT", total), pb_utils.Tensor("STEPS_OUT", steps)])
"""
TWICE_DYING = """
import os
import pathlib
import signal


class TritonPythonModel:
    '''As `twice`, but its process dies once for each number from 1000 on: at the place that the number's last digit
    says.'''

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        end = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        value = number(request)
        self.die(value, 0)
        value_of(call("running_sum", self.sent(value), flags=start, correlation_id=7).exec())
        self.die(value, 1)
        total = value_of(call("running_sum", self.sent(value), flags=end, correlation_id=7).exec())
        self.die(value, 2)
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS_IN").as_numpy() + 1
        return pb_utils.InferenceResponse([tensor("OUTPUT", total), pb_utils.Tensor("STEPS_OUT", steps)])

    def sent(self, value):
        return value

    def die(self, value, place):
        died = pathlib.Path(pb_utils.get_model_dir()) / f"died at {value}"
        if value >= 1000 and value % 10 == place and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
TWICE_OTHERWISE = (
    TWICE_DYING
    + """
    def sent(self, value):
        return value + (pathlib.Path(pb_utils.get_model_dir()) / f"died at {value}").exists()
"""
)
"""As `twice_dying`, but what it sends after its death is larger by one."""
TWICE_LATER = """
class TritonPythonModel:
    '''As `twice`, for all of its requests at once, and as a coroutine.'''

    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        end = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        same = {"correlation_id": request.correlation_id()}
        first, second = await asyncio.gather(
            call("running_sum", number(request), flags=start, **same).async_exec(),
            call("running_sum", number(request), flags=end, **same).async_exec(),
        )
        value_of(first)
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS_IN").as_numpy() + 1
        return pb_utils.InferenceResponse([tensor("OUTPUT", value_of(second)), pb_utils.Tensor("STEPS_OUT", steps)])
"""
KNOT = """
class TritonPythonModel:
    '''Calls another model with a number less by one, until none is left; answers with how often.'''

    def initialize(self, args):
        self.other = json.loads(args["model_config"])["parameters"]["calls"]["string_value"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = number(request)
        time.sleep(0.2)
        total = 1 + value_of(call(self.other, value - 1, trace=request.trace()).exec()) if value else 0
        return pb_utils.InferenceResponse([tensor("OUTPUT", total)])
"""


@dataclass(frozen=True)
class Doubled(Plan):
    """A sequence of `twice`."""

    @property
    def sums(self) -> list[int]:
        """The right answers."""
        return list(itertools.accumulate(2 * value for value in self.values))


def add_calling_model(
    repository: Path, name: str, code: str, *, sequences: bool = False, rows: int = 4, calls: str = "", count: int = 1
) -> str:
    """Puts a model into a repository; returns its name.

    code   of the class
    calls  the model that a `KNOT` calls
    count  of its instances in each executor
    """
    parameters = f'parameters {{ key: "calls" value: {{ string_value: "{calls}" }} }}' if calls else ""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(HEAD + code)
    (version.parent / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {rows}\n{TENSORS}{SEQUENCES if sequences else ""}'
        f"{parameters}\ninstance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"
    )
    return name
