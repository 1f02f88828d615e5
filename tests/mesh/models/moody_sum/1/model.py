# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Adds up a sequence's numbers; negative ones make it do what a model must not do. Each call takes a moment, so that
requests of several sequences share a batch.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

RAISES, REPORTS, WRONG_TYPE, WRONG_SHAPE, TOO_FEW, UNDECLARED, NO_LIST = range(-1, -8, -1)


class TritonPythonModel:
    """Holds nothing between two calls."""

    def execute(self, requests: list[Any]) -> Any:
        """One response per request, unless one of the requests asks for something else."""
        time.sleep(0.005)
        numbers = [scalar(request, "INPUT") if scalar(request, "READY") else 0 for request in requests]
        if RAISES in numbers:
            raise RuntimeError("this model does not like -1")
        if NO_LIST in numbers:
            return "no list"
        responses = [answer(request, number) for request, number in zip(requests, numbers, strict=True)]
        return responses[:-1] if TOO_FEW in numbers else responses


def scalar(request: Any, name: str) -> int:
    """The only element of an input tensor."""
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())


def answer(request: Any, number: int) -> Any:
    """The response to one request."""
    if number == REPORTS:
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError("not this number", pb_utils.TritonError.INVALID_ARG)
        )
    before = 0 if scalar(request, "START") else scalar(request, "SUM_IN")
    total = before + number
    tensors = [pb_utils.Tensor("SUM_OUT", np.array([[total]], dtype=np.int64))]
    if number == WRONG_TYPE:
        tensors.append(pb_utils.Tensor("OUTPUT", np.array([[total]], dtype=np.float32)))
    elif number == WRONG_SHAPE:
        tensors.append(pb_utils.Tensor("OUTPUT", np.array([[total, total]], dtype=np.int32)))
    else:
        tensors.append(pb_utils.Tensor("OUTPUT", np.array([[total]], dtype=np.int32)))
    if number == UNDECLARED:
        tensors.append(pb_utils.Tensor("SURPRISE", np.array([[total]], dtype=np.int32)))
    return pb_utils.InferenceResponse(tensors)
