# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Folds each request's number into the state of its sequence, which the mesh keeps; answers with fold and length."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FACTOR = 6364136223846793005
MASK = (1 << 63) - 1


class TritonPythonModel:
    """Holds nothing between two calls."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; each request is one row of one sequence."""
        return [fold(request) for request in requests]


def element(request: Any, name: str) -> int:
    """The only element of an input tensor."""
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())


def fold(request: Any) -> Any:
    """The state after this request, INT64 [1, 2], as OUTPUT and as the state STATE_OUT."""
    before, length = 0, 0
    if not element(request, "START"):
        before, length = map(int, pb_utils.get_input_tensor_by_name(request, "STATE_IN").as_numpy().reshape(2))
    length += 1
    after = np.array([[(before * FACTOR + element(request, "INPUT") + length) & MASK, length]], np.int64)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", after), pb_utils.Tensor("STATE_OUT", after)])
