"""Recurrent layers: their weights are put together while they run, which changes nothing that they compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.engine.base import Engine, Row
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.recurrent import RecurrentLayers
from shared.contract.model_config import StateSpec, TensorSpec
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, array, results, sequence_config, wire

LAYERS, SIZE, ROWS = 2, 6, 3


def weights_of(engine: Engine) -> list[torch.Tensor]:
    assert isinstance(engine, TorchEngine)
    module = engine._forward  # pyright: ignore[reportPrivateUsage]
    assert isinstance(module, torch.nn.Module)
    return list(module.parameters())


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("saved_as", ["script", "program"])
def test_layers_compute_the_same_before_their_weights_are_put_together_meanwhile_and_afterwards(
    workshop: Workshop, kind: str, saved_as: str
) -> None:
    torch.manual_seed(1)
    module = torch_modules.Recurrent(kind, SIZE, LAYERS).eval()
    if saved_as == "script":
        workshop.script("recurrent", module)
    else:
        workshop.program("recurrent", module, (torch.zeros(2, 1, SIZE), torch.zeros(2, LAYERS, SIZE)))
    config = sequence_config(
        "recurrent",
        "pytorch",
        inputs=[TensorSpec("x", "FP32", (1, SIZE))],
        outputs=[TensorSpec("y", "FP32", (1, SIZE))],
        states=[StateSpec("h", "h_next", "FP32", (LAYERS, SIZE))],
    )
    engine = workshop.load(config)
    is_cpu = workshop.device == "cpu"
    x, h = torch.randn(ROWS, 1, SIZE), torch.zeros(ROWS, LAYERS, SIZE)

    for step in range(4):
        rows = [Row({"x": wire("x", x[row : row + 1].numpy())}, slot=row, start=step == 0) for row in range(ROWS)]
        with RecurrentLayers() as layers:
            ran = results(engine, rows)
        if step == 1:
            layers.join_weights()
            # On a GPU the engine has done it with its first batch: they are in one piece.
            assert is_cpu or len({weight.untyped_storage().data_ptr() for weight in weights_of(engine)}) == 1

        with torch.inference_mode():
            y, h = module(x, h)
        np.testing.assert_allclose(y.numpy(), np.concatenate([array(row, "y") for row in ran]), rtol=1e-2, atol=2e-3)
