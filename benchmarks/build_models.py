# ruff: noqa: T201 - a script that is started by its path and talks to the terminal
"""Makes the model repository of the benchmarks.

    python benchmarks/build_models.py DIRECTORY

Copies `models/` beside this file and adds the weights of the LSTM, which are random, always the same, and too large
(13 MiB) to be kept in the repository. Needs torch.
"""

from __future__ import annotations

import argparse
import math
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

MODELS = Path(__file__).resolve().parent / "models"
INPUT_SIZE = 128
HIDDEN_SIZE = 512
OUTPUT_SIZE = 10
SEED = 512


class StackedLstm(nn.Module):
    """Two LSTM layers and a linear one: a single step, with states in and out."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.lower = nn.LSTMCell(INPUT_SIZE, hidden_size)
        self.upper = nn.LSTMCell(hidden_size, hidden_size)
        self.readout = nn.Linear(hidden_size, OUTPUT_SIZE)

    def forward(self, INPUT: Tensor, HIDDEN_IN: Tensor, CELL_IN: Tensor) -> dict[str, Tensor]:  # noqa: N803 - tensor names of config.pbtxt
        """INPUT [batch, 128], HIDDEN_IN and CELL_IN [batch, 2, hidden]: OUTPUT [batch, 10] and new states; all FP32."""
        lower_hidden, lower_cell = self.lower(INPUT, (HIDDEN_IN[:, 0], CELL_IN[:, 0]))
        upper_hidden, upper_cell = self.upper(lower_hidden, (HIDDEN_IN[:, 1], CELL_IN[:, 1]))
        return {
            "OUTPUT": self.readout(upper_hidden),
            "HIDDEN_OUT": torch.stack([lower_hidden, upper_hidden], 1),
            "CELL_OUT": torch.stack([lower_cell, upper_cell], 1),
        }


def seeded_lstm(hidden_size: int = HIDDEN_SIZE) -> StackedLstm:
    """The network with seeded random weights. The state of torch's global generator is kept."""
    generator = torch.Generator().manual_seed(SEED)
    lstm = StackedLstm(hidden_size).eval()
    bound = 1 / math.sqrt(hidden_size)
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return lstm


def build(directory: Path) -> None:
    """Writes the models of `models/` with what they need. Models of these names are overwritten."""
    shutil.copytree(MODELS, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for derived in (*directory.glob("device_*/1"), directory / "interpreter" / "1"):
        shutil.copy(MODELS / "accumulate" / "1" / "model.py", derived / "accumulate.py")
    for name in ("accumulate", "interpreter"):
        _in_processes(directory / name, f"{name}_process")
    # The version directory is not in the repository: git keeps no empty directories.
    (directory / "lstm_512" / "1").mkdir(exist_ok=True)
    with warnings.catch_warnings():
        # torch warns in favour of torch.export, but Triton's pytorch backend loads TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(seeded_lstm())
        for path in ("lstm_512/1/model.pt", "lstm_512_python/1/lstm.pt"):
            scripted.save(str(directory / path))


def _in_processes(model: Path, name: str) -> None:
    """Copies a model; each instance of the copy is a process of its own."""
    copy = model.with_name(name)
    shutil.copytree(model, copy, dirs_exist_ok=True)
    config = (model / "config.pbtxt").read_text().replace(f'name: "{model.name}"', f'name: "{name}"')
    parameter = 'parameters { key: "instance_process" value { string_value: "true" } }'
    (copy / "config.pbtxt").write_text(f"{config}\n{parameter}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model repository of the benchmarks.")
    parser.add_argument("directory", type=Path, help="where to; is created")
    directory: Path = parser.parse_args().directory
    build(directory)
    print(f"{directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")


if __name__ == "__main__":
    main()
