# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""A model that wants each request as often as its INPUT says, and then answers with what it saw each time.

OUTPUT  INT32: how often it was given the request
SEEN    BYTES: JSON list, one entry per time: request flags, START control, rows of that call, correlation id
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Nothing is known of any request."""
        self.passes: dict[Any, list[dict[str, Any]]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """None for each request that it wants again."""
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request: Any, rows: int) -> Any:
        """One pass of a request."""
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.passes[sequence] = []
        start = int(pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item())
        passes = self.passes[sequence]
        passes.append({"flags": request.flags(), "start": start, "rows": rows, "id": sequence})
        wanted = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item())
        if wanted < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("less than never"))
        if len(passes) < wanted:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        seen = np.array([[json.dumps(passes).encode()]], dtype=object)
        count = np.array([[len(passes)]], dtype=np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", count), pb_utils.Tensor("SEEN", seen)])
