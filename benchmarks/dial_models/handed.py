# `kept` lies beside this file where a server runs the model.
# pyright: basic, reportMissingImports=false
"""The same, and what is kept is handed out and taken back."""

from __future__ import annotations

import numpy as np
from kept import TritonPythonModel as Kept


class TritonPythonModel(Kept):
    """Two methods are all it takes."""

    def checkpoint(self, correlation_id: int | str) -> dict[str, np.ndarray]:
        """A sequence's state."""
        return {"sum": self.sums[correlation_id], "memory": self.memories[correlation_id]}

    def restore(self, correlation_id: int | str, state: dict[str, np.ndarray]) -> None:
        """Takes it back."""
        self.sums[correlation_id], self.memories[correlation_id] = state["sum"], state["memory"]
