"""Model repositories for a test's mesh: light ones, of the sample running sum under other names and settings."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from shared.contract.limits import RETRY_REPLIES
from tests.executor.engine import onnx_models, openvino_models, tensorflow_models

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "deploy" / "models"
MISBEHAVING = Path(__file__).resolve().parent / "models"
CONFORMANCE = ROOT / "tests" / "conformance" / "models"

FORGETFUL_MODEL = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The running sum, but kept in the process, by slot: what many models that were written for Triton do."""

    def initialize(self, args):
        self.sums = {{}}

    def execute(self, requests):
        return [self.add(request, row) for row, request in enumerate(requests)]

    def add(self, request, row):
        def number(name):
            return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())

        if number("READY"):
            self.sums[row] = number("INPUT") + (0 if number("START") else self.sums[row])
        total = np.array([[self.sums.get(row, 0)]], dtype=np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])
'''

METHODICAL_MODEL = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The running sum, kept in the process, by correlation id, and handed out and taken back."""

    def initialize(self, args):
        self.sums = {{}}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        def number(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        sequence = request.correlation_id()
        if number("READY").item():
            before = 0 if number("START").item() else self.sums[sequence]
            self.sums[sequence] = before + number("INPUT")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self.sums.get(sequence, number("INPUT")))])

    def checkpoint(self, correlation_id):
        return {{"sum": self.sums[correlation_id]}}

    def restore(self, correlation_id, state):
        self.sums[correlation_id] = state["sum"]
'''

SLOW_MODEL = '''
import time
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, but each batch takes {seconds} s."""

    def execute(self, requests):
        time.sleep({seconds})
        return super().execute(requests)
'''

TARDY_MODEL = '''
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, but each batch takes {seconds} s, and one number waits for a file."""

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        while any({number} in values for values in inputs) and not Path({gate!r}).exists():
            time.sleep(0.01)
        time.sleep({seconds})
        return super().execute(requests)
'''

SENDING_MODEL = '''
import threading
import time

import triton_python_backend_utils as pb_utils
from running_sum_model import TritonPythonModel as RunningSum
from running_sum_model import scalar


class TritonPythonModel(RunningSum):
    """The running sum, of which some are returned, some sent, and some sent later, in another order."""

    def execute(self, requests):
        responses = super().execute(requests)
        for index, (request, response) in enumerate(zip(requests, responses)):
            way = scalar(request, "INPUT") % 3
            if way and scalar(request, "READY"):
                responses[index] = None
                sender = request.get_response_sender()
                if way == 1:
                    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    threading.Thread(target=send_late, args=(sender, response, index), daemon=True).start()
        return responses


def send_late(sender, response, index):
    time.sleep(0.03 / (index + 1))
    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

HANGING_MODEL = '''
import ctypes
import sys
import time
import triton_python_backend_utils as pb_utils
from sample_model import TritonPythonModel as Sample


class TritonPythonModel(Sample):
    """The sample, but one number makes it hang: in one process asleep, in all others with the interpreter held."""

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy() for request in requests]
        while any({number} in values for values in inputs):
            if "{sleeper}" in " ".join(sys.argv):
                time.sleep(60)
            else:
                ctypes.PyDLL(None).sleep(600)
        return super().execute(requests)
'''
PATIENT_MODEL = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils
from sample_model import TritonPythonModel as Sample


class TritonPythonModel(Sample):
    # The sample, but one number makes it wait until nobody waits for the answer any more.

    def execute(self, requests):
        for request in requests:
            deadline = time.monotonic() + 60
            while {number} in pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy():
                Path("{begun}").touch()
                if request.is_cancelled():
                    error = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
                    return [pb_utils.InferenceResponse(error=error) for _ in requests]
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
        return super().execute(requests)
"""
ENDLESS_MODEL = '''


class Endless(TritonPythonModel):
    """Never comes back from one number, and only computes meanwhile."""

    def execute(self, requests):
        while any({number} in pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests):
            pass
        return super().execute(requests)


TritonPythonModel = Endless
'''
LOST_GPU_MODEL = '''
from pathlib import Path
import triton_python_backend_utils as pb_utils
from executor.engine.pytorch import devices
from sample_model import TritonPythonModel as Sample

ERROR = "CUDA error: device-side assert triggered"
lost = False


def problem(gpu):
    return ERROR if lost else ""


devices.gpu_problem = problem


class TritonPythonModel(Sample):
    """The sample, but one number costs the process its GPU, once."""

    def execute(self, requests):
        global lost
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        if any({number} in values for values in inputs) and not Path("{once}").exists():
            Path("{once}").touch()
            lost = True
        if lost:
            raise RuntimeError(ERROR)
        return super().execute(requests)
'''
LOSES_GPU = 1_000_002
"""The number that costs such a model its GPU."""
HANGS = 1_000_001
"""The number that makes a hanging model hang."""


IDLE_US = 300_000_000
"""Longer than any test, however busy the machine: a sequence that a test has left open shows."""


def add_sum_model(
    repository: Path,
    name: str = "running_sum",
    *,
    slots: int = 32,
    idle_us: int = IDLE_US,
    batch_s: float = 0.0,
    strategy: str = "direct { }",
    checkpoint_interval: int = 1,
    virtual_slots: bool = True,
    sends: bool = False,
    retry_replies: int = RETRY_REPLIES,
) -> str:
    """Puts the sample `running_sum` into a repository, changed; returns its name.

    slots    of one executor
    idle_us  `max_sequence_idle_microseconds`
    batch_s  how long each batch takes
    checkpoint_interval  steps between two checkpoints
    virtual_slots  False: whoever has a slot keeps it until the end, as in Triton
    sends    it answers two of three steps by response senders, one of them after its batch
    retry_replies  answers that are kept for retries
    """
    model = repository / name
    shutil.copytree(SAMPLES / "running_sum", model, ignore=shutil.ignore_patterns("__pycache__"))
    config = (model / "config.pbtxt").read_text()
    for pattern, replacement in (
        (r'^name: "running_sum"', f'name: "{name}"'),
        (r"^max_batch_size: \d+", f"max_batch_size: {slots}"),
        (r"max_sequence_idle_microseconds: \d+", f"max_sequence_idle_microseconds: {idle_us}"),
        (r"direct \{ \}", strategy),
    ):
        config, count = re.subn(pattern, replacement, config, count=1, flags=re.MULTILINE)
        assert count == 1, f"deploy/models/running_sum/config.pbtxt has no {pattern}"
    for parameter, value in (
        ("checkpoint_interval", checkpoint_interval),
        ("virtual_slots", str(virtual_slots).lower()),
        ("retry_replies", retry_replies),
    ):
        config += f'\nparameters: {{ key: "{parameter}", value: {{ string_value: "{value}" }} }}\n'
    (model / "config.pbtxt").write_text(config)
    if batch_s or sends:
        (model / "1" / "model.py").rename(model / "1" / "running_sum_model.py")
        (model / "1" / "model.py").write_text(SENDING_MODEL if sends else SLOW_MODEL.format(seconds=batch_s))
    return name


JOURNAL_STEPS = 6
OFF_BY_ONE = '''
import numpy as np
import triton_python_backend_utils as pb_utils
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, but from 100 on its answers are too large by one, and it fails at 666."""

    def execute(self, requests):
        return [self.changed(response) for response in super().execute(requests)]

    def changed(self, response):
        if response.has_error():
            return response
        output, state = response.output_tensors()
        total = output.as_numpy()
        if total.item() == 666:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("not this one"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total + np.int32(total >= 100)), state])
'''


def add_journaled_models(repository: Path) -> None:
    """The running sum in two versions, of which the second and newest is wrong from 100 on. Both keep journals."""
    model = repository / add_sum_model(repository, "journaled_sum", slots=4, checkpoint_interval=2)
    with (model / "config.pbtxt").open("a") as config:
        config.write("version_policy: { all { } }\n")
        config.write(f'parameters: {{ key: "journal_steps", value: {{ string_value: "{JOURNAL_STEPS}" }} }}\n')
    shutil.copytree(model / "1", model / "2")
    (model / "2" / "model.py").rename(model / "2" / "running_sum_model.py")
    (model / "2" / "model.py").write_text(OFF_BY_ONE)


def put_in_processes(repository: Path, *models: str, instances: int = 1) -> None:
    """Makes each instance of these models a process of its own."""
    for model in models:
        config = repository / model / "config.pbtxt"
        text = config.read_text()
        text = re.sub(r"^instance_group.*?\]$", "", text, flags=re.MULTILINE | re.DOTALL)
        text += '\nparameters: { key: "instance_process", value: { string_value: "true" } }\n'
        config.write_text(f"{text}instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n")


def add_hanging_models(repository: Path, sleeper: str) -> None:
    """Puts `running_sum` and `add_sub` into a repository; both hang when they are given `HANGS`.

    sleeper  executor in which they do so asleep; in others they hold the interpreter
    """
    add_sum_model(repository)
    add_stateless_model(repository)
    for name, tensor in (("running_sum", "INPUT"), ("add_sub", "INPUT0")):
        version = repository / name / "1"
        (version / "model.py").rename(version / "sample_model.py")
        (version / "model.py").write_text(HANGING_MODEL.format(input=tensor, number=HANGS, sleeper=sleeper))


def add_patient_model(repository: Path, name: str, begun: Path) -> str:
    """Puts a running sum into a repository that waits for a cancellation when it is given `HANGS`, and makes a file
    when it begins to; returns its name.
    """
    add_sum_model(repository, name)
    version = repository / name / "1"
    (version / "model.py").rename(version / "sample_model.py")
    (version / "model.py").write_text(PATIENT_MODEL.format(number=HANGS, begun=begun))
    return name


def add_tardy_model(repository: Path, name: str, *, gate: Path, idle_us: int, batch_s: float) -> str:
    """Puts a running sum into a repository whose batches take longer than a sequence may be idle; returns its name.

    gate  a file for which it waits when it is given `HANGS`
    """
    add_sum_model(repository, name, slots=2, idle_us=idle_us, batch_s=batch_s, virtual_slots=False)
    source = TARDY_MODEL.format(seconds=batch_s, number=HANGS, gate=str(gate))
    (repository / name / "1" / "model.py").write_text(source)
    return name


def add_endless_model(repository: Path) -> str:
    """Puts a running sum into a repository that does nothing but compute, without an end when it is given `HANGS`;
    returns its name.
    """
    name = add_sum_model(repository)
    with (repository / name / "1" / "model.py").open("a") as model:
        model.write(ENDLESS_MODEL.format(number=HANGS))
    return name


def add_model_that_loses_its_gpu(repository: Path, once: Path) -> str:
    """Puts a running sum into a repository that fails with its GPU when it is given `LOSES_GPU`, as a real kernel does:
    from then on every call fails, until the process ends. Needs no GPU; returns its name.

    once  a file that it makes then: it does so a single time
    """
    name = add_sum_model(repository)
    version = repository / name / "1"
    (version / "model.py").rename(version / "sample_model.py")
    (version / "model.py").write_text(LOST_GPU_MODEL.format(number=LOSES_GPU, once=once))
    return name


def add_forgetful_model(
    repository: Path,
    name: str = "forgetful_sum",
    *,
    source: str = FORGETFUL_MODEL,
    recovery: str = "",
) -> str:
    """Puts a running sum into a repository that keeps its state itself; returns its name.

    recovery  `sequence_recovery`; "" says nothing of it
    """
    add_sum_model(repository, name)
    config = (repository / name / "config.pbtxt").read_text()
    stateless = re.sub(r"^  state \[.*?^  \]$", "", config, flags=re.MULTILINE | re.DOTALL)
    assert stateless != config
    if recovery:
        stateless += f'\nparameters: {{ key: "sequence_recovery", value: {{ string_value: "{recovery}" }} }}\n'
    (repository / name / "config.pbtxt").write_text(stateless)
    (repository / name / "1" / "model.py").write_text(source.format())
    return name


def add_iterative_model(repository: Path, *, pass_s: float) -> str:
    """Puts the conformance suite's iterative model into a repository; each of its calls takes so long."""
    model = repository / "iterative"
    shutil.copytree(CONFORMANCE / "iterative", model, ignore=shutil.ignore_patterns("__pycache__"))
    source = (model / "1" / "model.py").read_text()
    call = "        return [self.answer("
    assert source.count(call) == 1
    (model / "1" / "model.py").write_text(source.replace(call, f"        __import__('time').sleep({pass_s})\n{call}"))
    return "iterative"


def add_stateless_model(repository: Path) -> str:
    """Puts the sample `add_sub` into a repository; returns its name."""
    shutil.copytree(SAMPLES / "add_sub", repository / "add_sub", ignore=shutil.ignore_patterns("__pycache__"))
    return "add_sub"


STREAMING_MODEL = '''
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The sums on the way to the next one, each as an answer, from a thread of the model. The state is declared."""

    def execute(self, requests):
        for request in requests:
            numbers = [pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT", "TOTAL_IN")]
            value, total = (0 if one is None else int(one.as_numpy().item()) for one in numbers)
            start = pb_utils.get_input_tensor_by_name(request, "START")
            if start is not None and start.as_numpy().item():
                total = 0
            sender = request.get_response_sender()
            threading.Thread(target=self.count, args=(sender, total, value, start is not None), daemon=True).start()

    def count(self, sender, total, value, keeps):
        for number in range(total + 1, total + value + 1):
            time.sleep(0.01)
            tensors = [pb_utils.Tensor("OUTPUT", np.array([[number]], np.int32))]
            if keeps:
                tensors.append(pb_utils.Tensor("TOTAL_OUT", np.array([[number]], np.int32)))
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=FINAL)
'''
STREAMING_CONFIG = """
backend: "python"
max_batch_size: 4
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{batching}
"""
STREAMING_SEQUENCES = f"""
sequence_batching {{
  max_sequence_idle_microseconds: {IDLE_US}
  oldest {{ max_candidate_sequences: 4 }}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }}
  ]
  state [ {{
    input_name: "TOTAL_IN" output_name: "TOTAL_OUT" data_type: TYPE_INT32 dims: [ 1 ]
    initial_state: {{ name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }}
  }} ]
}}
"""


def add_streaming_models(repository: Path) -> None:
    """Adds two decoupled models that count up to their input: one of requests, one of sequences, which goes on."""
    for name, batching in (("streamed_count", ""), ("streamed_sum", STREAMING_SEQUENCES)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(f'name: "{name}"' + STREAMING_CONFIG.format(batching=batching))
        (version / "model.py").write_text(STREAMING_MODEL)


SESSION_SUMS = ("onnx_sum", "openvino_sum", *(["tensorflow_sum"] if importlib.util.find_spec("tensorflow") else []))
"""Running sums, one for each runtime that opens a model as a session. TensorFlow is not for every machine."""


def add_session_models(repository: Path) -> None:
    """Adds `SESSION_SUMS`, with configurations that lack what the models themselves say."""
    batched = [onnx_models.BATCH, 1]
    onnx_models.save(
        _session_model(repository, "onnx_sum", 'platform: "onnxruntime_onnx"') / "model.onnx",
        [
            onnx_models.node("Add", ["SUM", "INPUT"], ["SUM_NEXT"]),
            onnx_models.node("Identity", ["SUM_NEXT"], ["OUTPUT"]),
        ],
        [onnx_models.value(tensor, onnx_models.INT32, batched) for tensor in ("INPUT", "SUM")],
        [onnx_models.value(tensor, onnx_models.INT32, batched) for tensor in ("OUTPUT", "SUM_NEXT")],
    )
    given, total = (openvino_models.value(tensor, np.int32, [-1, 1]) for tensor in ("INPUT", "SUM"))
    after = openvino_models.op.add(given, total)
    copy = openvino_models.op.multiply(after, np.int32(1))
    folder = _session_model(repository, "openvino_sum", "")
    openvino_models.save(folder / "model.xml", [given, total], {"SUM_NEXT": after, "OUTPUT": copy})
    if "tensorflow_sum" in SESSION_SUMS:
        tf = tensorflow_models.library()
        folder = _session_model(repository, "tensorflow_sum", 'platform: "tensorflow_savedmodel"')
        tensors = {tensor: (tf.int32, [None, 1]) for tensor in ("INPUT", "SUM")}

        def step(**given: Any) -> Any:
            next_sum = given["SUM"] + given["INPUT"]
            return {"SUM_NEXT": next_sum, "OUTPUT": next_sum}

        tensorflow_models.save(folder / "model.savedmodel", {"serving_default": (step, tensors)})


def _session_model(repository: Path, name: str, platform: str) -> Path:
    """Writes the configuration; returns where the model belongs."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f"""
{platform}
max_batch_size: 4
sequence_batching {{
  max_sequence_idle_microseconds: {IDLE_US}
  oldest {{ max_candidate_sequences: 16 }}
  state [ {{ input_name: "SUM", output_name: "SUM_NEXT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
}}
instance_group {{ count: 1 kind: KIND_CPU }}
""")
    return version
