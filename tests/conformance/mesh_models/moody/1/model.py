# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""A model that says when it is not ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def is_ready(self) -> bool:
        """Not while somebody wants it to be away."""
        return not list(Path(pb_utils.get_model_dir()).parent.glob("away_*"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers with the input."""
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]) for value in inputs]
