# The module beside this one is put here with the model (benchmarks/build_models.py).
# pyright: basic, reportMissingImports=false
"""The running sum on a simulated accelerator: a batch takes 5 ms, however many rows it has."""

from __future__ import annotations

import time
from typing import Any

from accumulate import TritonPythonModel as RunningSum

BATCH_S = 0.005


class TritonPythonModel(RunningSum):
    """Sleeps while the device would compute."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """As of the running sum."""
        time.sleep(BATCH_S)
        return super().execute(requests)
