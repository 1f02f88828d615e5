# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Running sums with a memory of some size: both are kept here, by correlation id."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

MEMORY = 1024


class TritonPythonModel:
    """Next to no computing, so that what is measured is the mesh."""

    def initialize(self, args: dict[str, str]) -> None:
        """Begins without any sequence."""
        self.sums: dict[int | str, np.ndarray] = {}
        self.memories: dict[int | str, np.ndarray] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order."""
        return [self.add(request) for request in requests]

    def add(self, request: Any) -> Any:
        """The sum after this request; it stands in the memory's first element too."""
        sequence, flags = request.correlation_id(), request.flags()
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[sequence], self.memories[sequence] = np.zeros((1, 1), np.int32), np.zeros(MEMORY, np.float32)
        total = self.sums[sequence] + pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.sums[sequence], self.memories[sequence]
        else:
            self.sums[sequence] = total
            self.memories[sequence][0] = total.item()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])
