"""A model that calls other models (triton-spec 8): what it is answered, and in which words."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http_sync

from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import ModelText

CALLER = """
backend: "python"
input [ { name: "WISH" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
PLAIN = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "TWICE" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
SEQUENCES = """
sequence_batching {
  direct { }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] }
  ]
}
"""
COMMON = """
import asyncio
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


CODES = "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED".split()


def request(model="plain", value=3, outputs=("OUTPUT",), **more):
    tensor = pb_utils.Tensor("INPUT", np.array([[value]], np.int32))
    return pb_utils.InferenceRequest(
        model_name=model, inputs=[tensor], requested_output_names=list(outputs), **more
    )


def told(response):
    if response.has_error():
        code = response.error().code()
        return [next(name for name in CODES if getattr(pb_utils.TritonError, name) == code), response.error().message()]
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def answers(requests, say):
    wishes = [pb_utils.get_input_tensor_by_name(one, "WISH").as_numpy()[0].decode() for one in requests]
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([json.dumps(say(wish))], dtype=object))])
        for wish in wishes
    ]

"""
SYNC = """
class TritonPythonModel:
    def initialize(self, args):
        try:
            self.early = told(request().exec())
        except pb_utils.TritonModelException as refused:
            self.early = str(refused)

    def ready(self):
        questions = [("plain",), ("plain", "1"), ("plain", "2"), ("nobody",), ("caller",)]
        return [pb_utils.is_model_ready(*question) for question in questions]

    def execute(self, requests):
        return answers(requests, lambda wish: getattr(self, wish)())

    def value(self):
        return told(request().exec())

    def some_outputs(self):
        return told(request(outputs=("TWICE",)).exec())

    def version(self):
        return told(request(model_version=1).exec())

    def parameters(self):
        return told(request(value=-2, parameters={"times": 5}).exec())

    def error(self):
        return told(request(value=-1).exec())

    def unknown(self):
        return told(request("nobody").exec())

    def wrong_input(self):
        tensor = pb_utils.Tensor("INPUT", np.array([[1.0]], np.float32))
        return told(pb_utils.InferenceRequest(model_name="plain", inputs=[tensor], requested_output_names=[]).exec())

    def in_initialize(self):
        return self.early

    def sequence(self):
        start, end = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        flags = {1: start, 2: 0, 3: end}
        return [told(request("sum", n, correlation_id=7, flags=flags[n]).exec()) for n in flags]

    def no_start(self):
        return told(request("sum", 1, correlation_id=4711).exec())

    def thread(self):
        said = []
        thread = threading.Thread(target=lambda: said.append(told(request().exec())))
        thread.start()
        thread.join()
        return said

    def stream(self):
        responses = request().exec(decoupled=True)
        return [[told(one) for one in responses], [told(one) for one in responses]]

    def failing_stream(self):
        return [told(one) for one in request(value=-1).exec(decoupled=True)]
"""
ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        said = await self.say()
        return answers(requests, lambda wish: said)

    async def say(self):
        both = await asyncio.gather(request(value=4).async_exec(), request(value=5).async_exec())
        responses = await request(value=6).async_exec(decoupled=True)
        return [told(one) for one in (*both, *responses)]
"""
ANSWERING = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sum = 0

    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        start = pb_utils.get_input_tensor_by_name(request, "START")
        if value[0, 0] == -1:
            error = pb_utils.TritonError("not this number", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        if value[0, 0] == -2:
            value = value * json.loads(request.parameters())["times"]
        if start is not None:
            self.sum = value if start.as_numpy().item() else self.sum + value
            value = self.sum
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value), pb_utils.Tensor("TWICE", 2 * value)])
"""


def ask(address: str, wish: str, model: str = "caller") -> Any:
    with http_sync.InferenceServerClient(address, network_timeout=60) as typed:
        client: Any = typed
        tensor = http_sync.InferInput("WISH", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([wish], dtype=object))
        return json.loads(client.infer(model, [tensor]).as_numpy("SAID")[0])


def output(value: int, name: str = "OUTPUT") -> dict[str, Any]:
    return {name: [[value]]}


NOT_THIS = ["INVALID_ARG", "not this number"]
REFUSED = "Model {} - Error when running inference: {}"
SAID: dict[str, Any] = {
    "value": output(3),
    "some_outputs": output(6, "TWICE"),
    "version": output(3),
    "parameters": output(-10),
    "error": NOT_THIS,
    "unknown": [
        "NOT_FOUND",
        REFUSED.format("nobody", "Failed for execute the inference request. Model 'nobody' is not ready."),
    ],
    "wrong_input": [
        "INVALID_ARG",
        REFUSED.format(
            "plain",
            "[request id: <id_unknown>] inference input 'INPUT' data-type is 'FP32', but model 'plain' expects 'INT32'",
        ),
    ],
    "ready": [True, True, False, False, True],
    "in_initialize": "BLS is only supported during the 'execute' function.",
    "sequence": [output(1), output(3), output(6)],
    "no_start": [
        "INVALID_ARG",
        REFUSED.format(
            "sum",
            "inference request for sequence 4711 to model 'sum' must specify the START flag on the first request of "
            "the sequence",
        ),
    ],
    "thread": [output(3)],
    "stream": [[output(3)], [output(3)]],
    "failing_stream": [NOT_THIS],
}
"""What the model is told, by the name of its method."""


@pytest.mark.differs("Triton gives every error of a call the code INTERNAL")
def test_what_a_model_is_told_that_calls_another_one(make_target: MakeTarget) -> None:
    target = make_target(
        [
            ModelText("caller", CALLER, {"1/model.py": COMMON + SYNC}),
            ModelText("later", CALLER, {"1/model.py": COMMON + ASYNC}),
            ModelText("plain", PLAIN, {"1/model.py": ANSWERING}),
            ModelText("sum", PLAIN + SEQUENCES, {"1/model.py": ANSWERING}),
        ]
    )
    said = {wish: ask(target.http, wish) for wish in SAID}
    later = ask(target.http, "", "later")

    expected = (
        SAID if target.is_mesh else json.loads(re.sub('"(INVALID_ARG|NOT_FOUND)"', '"INTERNAL"', json.dumps(SAID)))
    )
    assert expected == said
    assert [output(4), output(5), output(6)] == later
