# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""The sum of a sequence, kept by the model; a step's answers are the sums on the way, from a thread of the model."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[request.correlation_id()] = 0
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
            sender = request.get_response_sender()
            threading.Thread(target=self.count, args=(sender, request.correlation_id(), value), daemon=True).start()

    def count(self, sender, sequence, value):
        for _ in range(value):
            self.sums[sequence] += 1
            total = np.array([[self.sums[sequence]]], np.int32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)]))
        sender.send(flags=FINAL)
