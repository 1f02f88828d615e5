# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""One response for each element of the input. Parameters of the request:

thread    the responses come from a thread of the model's own, after `execute` has returned
flag      the last response carries the final flag; else it comes alone
fail_at   in place of this response comes an error
fail_last the final flag comes with an error
raises    `execute` raises after the responses
wrong_at  this response has a tensor of another type
forget    no final flag is sent, and the sender is dropped
late      a response is tried after the final flag; what becomes of it is logged
endless   the responses begin again and again until the request is cancelled
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.cancelled = 0

    def execute(self, requests):
        for request in requests:
            said = json.loads(request.parameters() or "{}")
            values = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1).copy()
            sender = request.get_response_sender()
            if said.get("thread"):
                threading.Thread(target=self.answer, args=(sender, values, said), daemon=True).start()
            else:
                self.answer(sender, values, said)

    def answer(self, sender, values, said):
        if said.get("asked"):
            sender.send(response(self.cancelled), FINAL)
            return
        while said.get("endless"):
            for value in values:
                sender.send(response(value))
            time.sleep(0.01)
            if sender.is_cancelled():
                self.cancelled += 1
                break
        for index, value in enumerate(values):
            if said.get("fail_at") == index:
                one = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"answer {index} failed"))
            elif said.get("wrong_at") == index:
                one = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([0.5], np.float64))])
            else:
                one = response(value)
            sender.send(one, FINAL if said.get("flag") and index == len(values) - 1 else 0)
        if said.get("raises"):
            raise ValueError("raised on request")
        if said.get("forget"):
            return
        if said.get("fail_last"):
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("all of it failed")), FINAL)
        elif not (said.get("flag") and len(values)):
            sender.send(flags=FINAL)
        if said.get("late"):
            try:
                sender.send(response(-1))
            except Exception as refused:  # noqa: BLE001 - Triton and the mesh raise different classes
                pb_utils.Logger.log_info(f"refused: {refused}")


def response(value):  # noqa: ANN201 - a model of Triton
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([value], np.int32))])
