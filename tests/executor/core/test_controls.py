"""Control tensors as the model asked for them (triton-spec 1.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executor.core.controls import ControlTensors
from shared.model_config.values import ControlKind, ControlSpec, Direct, ModelConfig, SequenceBatching
from shared.tensors import to_numpy


def config(*controls: ControlSpec, max_batch_size: int = 4) -> ModelConfig:
    return ModelConfig(
        "m", "python", "", max_batch_size, (), (), sequence_batching=SequenceBatching(Direct(), 1000, tuple(controls))
    )


@pytest.mark.parametrize(
    ("datatype", "false_true", "expected"),
    [("INT32", (0, 1), 1), ("FP32", (-1.0, 2.5), 2.5), ("BOOL", (0, 1), True), ("INT32", (7, 9), 9)],
)
def test_flags_have_the_models_own_values(datatype: str, false_true: tuple[float, float], expected: Any) -> None:
    controls = ControlTensors(config(ControlSpec("S", ControlKind.START, datatype, false_true)))

    on = to_numpy(controls.of(start=True, end=False, ready=True, correlation_id=1)["S"])
    off = to_numpy(controls.of(start=False, end=True, ready=True, correlation_id=1)["S"])

    assert [[expected]] == on.tolist()
    assert [[false_true[0]]] == off.tolist()


def test_a_model_without_batch_dimension_gets_one_value() -> None:
    controls = ControlTensors(config(ControlSpec("R", ControlKind.READY, "INT32", (0, 1)), max_batch_size=0))

    assert (1,) == controls.of(start=False, end=False, ready=True, correlation_id=1)["R"].shape


@pytest.mark.parametrize(
    ("datatype", "correlation_id", "expected"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**31, -(2**31)),
        ("BYTES", "é", "é".encode()),
        ("BYTES", "", b""),
    ],
)
def test_the_correlation_id_in_every_type(datatype: str, correlation_id: int | str, expected: Any) -> None:
    controls = ControlTensors(config(ControlSpec("C", ControlKind.CORRID, datatype)))

    tensor = controls.of(start=False, end=False, ready=True, correlation_id=correlation_id)["C"]

    assert [[expected]] == to_numpy(tensor).tolist()
    assert datatype == tensor.datatype


def test_a_null_row_is_not_ready_and_belongs_to_nobody() -> None:
    controls = ControlTensors(
        config(ControlSpec("R", ControlKind.READY, "BOOL", (0, 1)), ControlSpec("C", ControlKind.CORRID, "UINT64"))
    )

    made = controls.of(start=False, end=False, ready=False, correlation_id=0)

    assert not to_numpy(made["R"]).any()
    assert np.uint64(0) == to_numpy(made["C"])[0, 0]
