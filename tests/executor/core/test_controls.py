"""Control tensors as the model asked for them (triton-spec 1.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from executor.core.controls import ControlTensors
from shared.contract.model_config import ControlKind, ControlSpec, Direct, ModelConfig, SequenceBatching
from shared.contract.tensors import to_numpy


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

    on = to_numpy(controls.of(start=True, end=False, correlation_id=1)["S"])
    off = to_numpy(controls.of(start=False, end=True, correlation_id=1)["S"])

    assert [[expected]] == on.tolist()
    assert [[false_true[0]]] == off.tolist()


def test_a_model_without_batch_dimension_gets_one_value() -> None:
    controls = ControlTensors(config(ControlSpec("R", ControlKind.READY, "INT32", (0, 1)), max_batch_size=0))

    assert (1,) == controls.of(start=False, end=False, correlation_id=1)["R"].shape


@pytest.mark.parametrize(
    ("datatype", "correlation_id", "expected"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**31, -(2**31)),
        ("BYTES", "é", "é".encode()),
    ],
)
def test_the_correlation_id_in_every_type(datatype: str, correlation_id: int | str, expected: Any) -> None:
    controls = ControlTensors(config(ControlSpec("C", ControlKind.CORRID, datatype)))

    tensor = controls.of(start=False, end=False, correlation_id=correlation_id)["C"]

    assert [[expected]] == to_numpy(tensor).tolist()
    assert datatype == tensor.datatype


def test_a_null_row_is_not_ready_and_belongs_to_nobody() -> None:
    controls = ControlTensors(
        config(ControlSpec("R", ControlKind.READY, "BOOL", (0, 1)), ControlSpec("C", ControlKind.CORRID, "UINT64"))
    )

    made = controls.null_row

    assert not to_numpy(made["R"]).any()
    assert np.uint64(0) == to_numpy(made["C"])[0, 0]


@pytest.mark.parametrize("max_batch_size", [0, 4])
@pytest.mark.parametrize(("datatype", "nobody"), [("BYTES", b""), ("UINT64", 0), ("INT32", 0)])
def test_a_null_rows_correlation_id_is_nobodys(datatype: str, nobody: Any, max_batch_size: int) -> None:
    controls = ControlTensors(config(ControlSpec("C", ControlKind.CORRID, datatype), max_batch_size=max_batch_size))

    tensor = controls.null_row["C"]

    assert nobody == to_numpy(tensor).item()
    assert ((1, 1) if max_batch_size else (1,)) == tensor.shape


@pytest.mark.parametrize(
    ("datatype", "correlation_id", "refused"),
    [
        ("BYTES", "text", False),
        ("BYTES", 7, True),
        *[(datatype, 7, False) for datatype in ("UINT64", "INT64", "UINT32", "INT32")],
        *[(datatype, "7", True) for datatype in ("UINT64", "INT64", "UINT32", "INT32")],
    ],
)
def test_an_id_of_the_other_kind_is_a_problem(datatype: str, correlation_id: int | str, *, refused: bool) -> None:
    controls = ControlTensors(config(ControlSpec("C", ControlKind.CORRID, datatype)))

    assert refused is bool(controls.problem(correlation_id))
    assert not ControlTensors(config()).problem(correlation_id), "without the control any id will do"
