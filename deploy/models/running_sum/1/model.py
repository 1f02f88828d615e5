"""Adds each request's number to the sum of its sequence. The sum itself is kept by the server, as implicit state."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

INT32 = np.iinfo(np.int32)


class TritonPythonModel:
    """Holds nothing between two calls: what a sequence is, each request says by itself."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; each request is one row, [1, 1], of one sequence."""
        return [add(request) for request in requests]


def scalar(request: Any, name: str) -> int:
    """The only element of an input tensor."""
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())


def add(request: Any) -> Any:
    """The sum after this request, as OUTPUT and as the state SUM_OUT; an error when OUTPUT cannot hold it."""
    # A row that is not ready is padding: its other inputs mean nothing, and nobody reads its response.
    ready = scalar(request, "READY") != 0
    before = 0 if scalar(request, "START") or not ready else scalar(request, "SUM_IN")
    after = before + scalar(request, "INPUT") if ready else 0
    if not INT32.min <= after <= INT32.max:
        message = f"the sum {after} does not fit INT32; the sequence's sum stays {before}"
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("OUTPUT", np.array([[after]], dtype=np.int32)),
            pb_utils.Tensor("SUM_OUT", np.array([[after]], dtype=np.int64)),
        ]
    )
