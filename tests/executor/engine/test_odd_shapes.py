"""Tensors without elements and scalars (`reshape` to nothing) pass through both engines, alone and in a batch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from executor.engine.base import Row
from shared.contract.model_config import TensorSpec
from shared.contract.tensors import Tensor
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, plain_config, results

PYTHON = """
    class TritonPythonModel:
        def execute(self, requests):
            given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
            assert all(array.ndim == {rank} for array in given), given
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in given]
"""
BACKENDS = ("pytorch", "python")
EMPTY = np.zeros((1, 0, 2))


def doubled(workshop: Workshop, backend: str, spec: TensorSpec, *contents: object) -> list[Tensor]:
    """What a model that doubles `x` makes of requests with these contents, in one batch."""
    rank = 1 + len(spec.dims if spec.reshape is None else spec.reshape)
    workshop.script("doubled", torch_modules.Doubled())
    workshop.python("doubled", PYTHON.replace("{rank}", str(rank)))
    output = msgspec.structs.replace(spec, name="y")
    engine = workshop.load(plain_config("doubled", backend, inputs=[spec], outputs=[output]))
    arrays = [np.array(content, "<f4") for content in contents]
    rows = [Row({"x": Tensor("x", "FP32", array.shape, array.tobytes())}) for array in arrays]
    return [result.outputs[0] for result in results(engine, rows)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_elements_keep_their_shape_beside_others(workshop: Workshop, backend: str) -> None:
    empty, two, also_empty = doubled(workshop, backend, TensorSpec("x", "FP32", (-1, 2)), EMPTY, [[[1, 2]]], EMPTY)

    assert ((1, 0, 2), b"") == (empty.shape, empty.raw) == (also_empty.shape, also_empty.raw)
    assert ((1, 1, 2), np.array([2, 4], "<f4").tobytes()) == (two.shape, two.raw)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_is_reshaped_to_a_scalar_is_one_number_per_row(workshop: Workshop, backend: str) -> None:
    one, several = doubled(workshop, backend, TensorSpec("x", "FP32", (1,), reshape=()), [[3]], [[4], [5]])

    assert ((1, 1), np.array([6], "<f4").tobytes()) == (one.shape, one.raw)
    assert ((2, 1), np.array([8, 10], "<f4").tobytes()) == (several.shape, several.raw)
