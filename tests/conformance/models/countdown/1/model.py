# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Counts a request down, one number in each pass; the request is rescheduled until it is at 0."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            sequence = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.left[sequence] = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item()
            self.left[sequence] -= 1
            left = np.array([[self.left[sequence]]], np.int32)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", left)])
            sender = request.get_response_sender()
            if self.left[sequence] > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(response)
            else:
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                del self.left[sequence]
