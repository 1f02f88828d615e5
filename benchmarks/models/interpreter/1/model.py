# The module beside this one is put here with the model (benchmarks/build_models.py).
# pyright: basic, reportMissingImports=false
"""The running sum, by a model that keeps its interpreter: a batch computes for about 5 ms in Python."""

from __future__ import annotations

from typing import Any

from accumulate import TritonPythonModel as RunningSum

ROUNDS = 100_000


class TritonPythonModel(RunningSum):
    """Counts, as a tokenizer or a decoder in Python would."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """As of the running sum."""
        count = 0
        for number in range(ROUNDS):
            count += number & 1
        return super().execute(requests)
