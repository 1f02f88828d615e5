"""Models that incidents happened to, or that make them visible."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: {slots}
{tensors}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} ] }}
  ]
  {states}
}}
parameters: {{ key: "virtual_slots", value: {{ string_value: "false" }} }}
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
"""

NAN_MODEL = '''
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A running sum of floats: a NaN stays in its sequence for ever. What is no sequence's row is full of them too."""

    def execute(self, requests):
        time.sleep(0.02)
        return [self.add(request) for request in requests]

    def add(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        before = np.zeros((1, 1), np.float32) if value("START").item() else value("SUM_IN")
        after = before + value("INPUT") if value("READY").item() else np.full((1, 1), np.nan, np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", after), pb_utils.Tensor("SUM_OUT", after)])
'''

TWO_STATE_MODEL = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A cache and its length, as a speech encoder has them; of one type and shape: only values tell them apart."""

    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        def value(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        starts = value("START").item() or not value("READY").item()
        cache = value("INPUT") + (0 if starts else value("cache_last_channel"))
        length = np.ones((1, 1), np.int32) + (0 if starts else value("cache_last_channel_len"))
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("OUTPUT", np.concatenate([cache, length], axis=1).astype(np.int32)),
                pb_utils.Tensor("cache_last_channel_next", cache.astype(np.int32)),
                pb_utils.Tensor("cache_last_channel_len_next", length.astype(np.int32)),
            ]
        )
'''


def state(input_name: str, output_name: str, datatype: str) -> str:
    """A declared state of one element, zero at first."""
    zero = f'initial_state: {{ name: "z" data_type: {datatype} dims: [ 1 ] zero_data: true }}'
    names = f'input_name: "{input_name}" output_name: "{output_name}"'
    return f"state [ {{ {names} data_type: {datatype} dims: [ 1 ] {zero} }} ]"


def add(repository: Path, name: str, source: str, **settings: object) -> str:
    """Puts a model into a repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, **settings))
    (repository / name / "1" / "model.py").write_text(source)
    return name


def tensors(datatype: str, outputs: int) -> str:
    """INPUT of one element, and OUTPUT."""
    return (
        f'input [ {{ name: "INPUT" data_type: {datatype} dims: [ 1 ] }} ]\n'
        f'output [ {{ name: "OUTPUT" data_type: {datatype} dims: [ {outputs} ] }} ]'
    )


def add_nan_model(repository: Path, *, slots: int, idle_us: int) -> str:
    """The running sum of floats."""
    states = state("SUM_IN", "SUM_OUT", "TYPE_FP32")
    return add(
        repository, "nan_sum", NAN_MODEL, slots=slots, idle_us=idle_us, tensors=tensors("TYPE_FP32", 1), states=states
    )


def add_two_state_model(repository: Path) -> str:
    """The cache and its length, under the names of the incident."""
    cache = state("cache_last_channel", "cache_last_channel_next", "TYPE_INT32")
    length = state("cache_last_channel_len", "cache_last_channel_len_next", "TYPE_INT32")
    return add(
        repository,
        "two_states",
        TWO_STATE_MODEL,
        slots=4,
        idle_us=60_000_000,
        tensors=tensors("TYPE_INT32", 2),
        states=f"{cache}\n  {length}",
    )
