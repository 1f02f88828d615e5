# `kept` lies beside this file where a server runs the model.
# pyright: basic, reportMissingImports=false
"""As `kept.py`, with the two methods by which the mesh reads and restores a sequence's state."""

from __future__ import annotations

import numpy as np
from kept import TritonPythonModel as Kept


class TritonPythonModel(Kept):
    """Adds `checkpoint` and `restore` to the model that keeps its state."""

    def checkpoint(self, correlation_id: int | str) -> dict[str, np.ndarray]:
        return {"sum": self.sums[correlation_id], "memory": self.memories[correlation_id]}

    def restore(self, correlation_id: int | str, state: dict[str, np.ndarray]) -> None:
        """Restores a sequence's state."""
        self.sums[correlation_id], self.memories[correlation_id] = state["sum"], state["memory"]
