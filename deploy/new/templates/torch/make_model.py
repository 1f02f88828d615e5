"""Writes 1/model.pt. Put your own module here, train it, and run this file again."""

from pathlib import Path

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """The names of the arguments and of the keys of the result are the names of the tensors in config.pbtxt."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(input_size=1, hidden_size=16)
        self.readout = nn.Linear(16, 1)

    def forward(self, X: Tensor, HIDDEN_IN: Tensor):
        """X [batch, 1], HIDDEN_IN [batch, 16]: a row for each sequence that has a step in this call."""
        hidden = self.cell(X, HIDDEN_IN)
        return {"Y": self.readout(hidden), "HIDDEN_OUT": hidden}


torch.manual_seed(1)
file = Path(__file__).parent / "1" / "model.pt"
file.parent.mkdir(exist_ok=True)
torch.jit.script(Model().eval()).save(file)
