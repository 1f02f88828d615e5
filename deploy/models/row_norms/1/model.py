"""Euclidean lengths of vectors, all requests of a batch in one matrix that is padded to the longest."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Holds nothing between two calls."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; a request brings [rows, n] and gets [rows, 1], float32."""
        parts = [pb_utils.get_input_tensor_by_name(request, "VECTOR").as_numpy() for request in requests]
        ends = np.cumsum([len(part) for part in parts])
        padded = np.zeros((ends[-1], max(part.shape[1] for part in parts)), np.float32)
        for part, end in zip(parts, ends, strict=True):
            padded[end - len(part) : end, : part.shape[1]] = part
        norms = np.linalg.norm(padded, axis=1, keepdims=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("NORM", own)]) for own in np.split(norms, ends[:-1])]
