# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""One response for each request, though the model is not decoupled: the input, plus where it came from. Parameters:

returns  `execute` returns the response (plus 0)
now      what the sender does while `execute` runs (plus 1000)
later    what it does in the next call of `execute`, on a thread of the model's own (plus 2000)

What a sender does, separated by commas: "answer" sends a response, "final" one with the final flag, "flag" the flag
alone, "error" an error with the final flag, "drop" lets go of it. "raise" raises.
"""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.open = []

    def execute(self, requests):  # noqa: ANN201 - a model of Triton
        waiting, self.open = self.open, []
        for one in waiting:
            threading.Thread(target=act, args=one, daemon=True).start()
        responses = []
        for request in requests:
            said = json.loads(request.parameters() or "{}")
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
            if said.get("now"):
                act(request.get_response_sender(), value + 1000, said["now"])
            if said.get("later"):
                self.open.append((request.get_response_sender(), value + 2000, said["later"]))
            responses.append(response(value) if said.get("returns") else None)
        return responses


def act(sender, value, what):
    for one in what.split(","):
        if one in ("answer", "final"):
            sender.send(response(value), FINAL if one == "final" else 0)
        elif one == "flag":
            sender.send(flags=FINAL)
        elif one == "error":
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it failed")), FINAL)
        elif one == "raise":
            raise ValueError("odd")


def response(value):  # noqa: ANN201 - a model of Triton
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[value]], np.int32))])
