# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""Runs the LSTM of `lstm.pt` on all requests of a batch. States come with the requests, or are kept here by a server
that hands none over (Triton's Python backend).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

BLANK = np.zeros((1, 2, 512), dtype=np.float32)


class TritonPythonModel:
    """Keeps states only where the server hands none over."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the weights that lie beside this file."""
        self.lstm = torch.jit.load(str(Path(__file__).with_name("lstm.pt")))
        self.kept: dict[int | str, tuple[np.ndarray, np.ndarray]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; each request is one row of one sequence, INPUT [1, 128]."""
        states = [self.state_of(request) for request in requests]
        with torch.inference_mode():
            answer = self.lstm(
                torch.from_numpy(np.concatenate([array(request, "INPUT") for request in requests])),
                torch.from_numpy(np.concatenate([hidden for hidden, _ in states])),
                torch.from_numpy(np.concatenate([cell for _, cell in states])),
            )
        results = {name: tensor.numpy() for name, tensor in answer.items()}
        return [self.respond(request, row, results) for row, request in enumerate(requests)]

    def state_of(self, request: Any) -> tuple[np.ndarray, np.ndarray]:
        """Hidden and cell that the request's sequence stands at, [1, 2, 512] float32 each."""
        if array(request, "START").item():
            return BLANK, BLANK
        if pb_utils.get_input_tensor_by_name(request, "HIDDEN_IN") is not None:
            return array(request, "HIDDEN_IN"), array(request, "CELL_IN")
        return self.kept.get(request.correlation_id(), (BLANK, BLANK))

    def respond(self, request: Any, row: int, results: dict[str, np.ndarray]) -> Any:
        """The request's row of the results; its state goes out with it, or into the keep."""
        parts = {name: result[row : row + 1] for name, result in results.items()}
        if pb_utils.get_input_tensor_by_name(request, "HIDDEN_IN") is not None:
            return pb_utils.InferenceResponse([pb_utils.Tensor(name, part) for name, part in parts.items()])
        if array(request, "END").item():
            self.kept.pop(request.correlation_id(), None)
        else:
            # Copies: a view would keep the whole batch's result alive.
            self.kept[request.correlation_id()] = (parts["HIDDEN_OUT"].copy(), parts["CELL_OUT"].copy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", parts["OUTPUT"])])


def array(request: Any, name: str) -> np.ndarray:
    """An input tensor's content."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
