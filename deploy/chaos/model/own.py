# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""The fold of `declared.py` in a model that keeps its state itself, by correlation id, and can hand it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FACTOR = 6364136223846793005
MASK = (1 << 63) - 1


class TritonPythonModel:
    """Keeps (fold, length) of every sequence that has not ended."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begins without any sequence."""
        self.states: dict[int | str, tuple[int, int]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; each request is one row of one sequence."""
        return [self.fold(request) for request in requests]

    def fold(self, request: Any) -> Any:
        """The state after this request, INT64 [1, 2], as OUTPUT. A sequence that is not known here is an error."""
        sequence = request.correlation_id()
        if element(request, "START"):
            self.states[sequence] = (0, 0)
        if sequence not in self.states:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"sequence {sequence} is not known here"))
        before, length = self.states[sequence]
        after = (before * FACTOR + element(request, "INPUT") + length + 1) & MASK, length + 1
        self.states[sequence] = after
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([after], np.int64))])

    def checkpoint(self, correlation_id: int | str) -> dict[str, Any]:
        """The state of a sequence, to be kept by the mesh."""
        return {"state": np.array(self.states[correlation_id], np.int64)}

    def restore(self, correlation_id: int | str, state: dict[str, Any]) -> None:
        """Takes a sequence over from another executor."""
        fold, length = state["state"].tolist()
        self.states[correlation_id] = (fold, length)


def element(request: Any, name: str) -> int:
    """The only element of an input tensor."""
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item())
