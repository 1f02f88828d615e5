"""Adds one to each number. It keeps nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One response per request, in order."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """NEXT is NUMBER + 1."""
        return [answer(request) for request in requests]


def answer(request: Any) -> Any:
    """The response to one request."""
    number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("NEXT", (number + 1).astype(np.int32))])
