"""A conversation: each step is what somebody says, and the reply goes out character by character."""

from pathlib import Path

import torch
import triton_python_backend_utils as pb_utils

REPLY_CHARACTERS = 24
"""A model with sense would end when it has said all."""


class TritonPythonModel:
    def initialize(self, args):
        self.attention = torch.jit.load(Path(__file__).with_name("model.pt"))

    def execute(self, requests):
        for request in requests:
            self.reply(request, request.get_response_sender())

    def reply(self, request, sender):
        given = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("TEXT", "CACHE_IN")]
        text, cache = map(torch.from_numpy, given)
        for last in [False] * (REPLY_CHARACTERS - 1) + [True]:
            with torch.inference_mode():
                made = self.attention(text, cache)
            text, cache = made["NEXT"], made["CACHE_OUT"]
            # The state leaves with the last answer, and both are committed as one.
            tensors = [pb_utils.Tensor("NEXT", text.numpy())]
            tensors += [pb_utils.Tensor("CACHE_OUT", cache.numpy())] if last else []
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
            sender.send(pb_utils.InferenceResponse(tensors), flags=flags)
