# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Running sums with a memory of some size: both are declared, and come and go with the request."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Next to no computing, so that what is measured is the mesh."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order."""
        return [self.add(request) for request in requests]

    def add(self, request: Any) -> Any:
        """The sum after this request; it stands in the memory's first element too."""
        total = array(request, "SUM_IN") + array(request, "INPUT")
        memory = array(request, "MEMORY_IN")
        memory[0, 0] = total.item()
        given = {"OUTPUT": total, "SUM_OUT": total, "MEMORY_OUT": memory}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, each) for name, each in given.items()])


def array(request: Any, name: str) -> Any:
    """An input tensor's content."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
