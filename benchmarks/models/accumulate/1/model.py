# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Running sums, INT32 with wrap-around. The sum comes with the request, or is kept here by a server that lacks that."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Keeps sums only where the server hands none over (Triton's Python backend)."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begins without any sequence."""
        self.kept: dict[int | str, np.ndarray] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; each request is one row, [1, 1], of one sequence."""
        return [self.add(request) for request in requests]

    def add(self, request: Any) -> Any:
        """The sum after this request."""
        number = array(request, "INPUT")
        starts = bool(array(request, "START").item())
        handed = pb_utils.get_input_tensor_by_name(request, "SUM_IN")
        before = handed.as_numpy() if handed is not None else self.kept.get(request.correlation_id())
        after = number if starts or before is None else before + number
        if handed is not None:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", after), pb_utils.Tensor("SUM_OUT", after)])
        if array(request, "END").item():
            self.kept.pop(request.correlation_id(), None)
        else:
            self.kept[request.correlation_id()] = after
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", after)])


def array(request: Any, name: str) -> np.ndarray:
    """An input tensor's content."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
