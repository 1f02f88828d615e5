"""What holds for every runtime that opens a model as a session: batches equal single rows, states stay with their
sequence, a wrong row is alone, and what does not fit is told at load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from executor.engine.base import Engine, FixesShape, Row, RowError
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import ControlKind, ControlSpec, StateSpec, TensorSpec
from tests.executor.engine import onnx_models, openvino_models, tensorflow_models
from tests.executor.engine.leaky_sum import leaky_config, leaky_row
from tests.executor.engine.model_workshop import (
    Workshop,
    find_backend,
    plain_config,
    raws,
    results,
    wire,
)


@dataclass(frozen=True)
class Runtime:
    """A backend, and who writes the same models for it: `leaky(path)`, and `leaky(path, batch)` of a fixed batch.

    error  what is said of an index that the leaky sum does not have, as a pattern; "" where any gives a number
    """

    backend: str
    file: str
    leaky: Callable[..., Path]
    error: str


RUNTIMES = (
    Runtime(
        "onnxruntime", "model.onnx", onnx_models.leaky_sum, r"onnx runtime error: .*indices element out of data bounds"
    ),
    Runtime("openvino", "model.xml", openvino_models.leaky_sum, ""),
    Runtime("tensorflow", "model.savedmodel", tensorflow_models.leaky_sum, r"TensorFlow error: .*is not in \[0, 4\)"),
)


@pytest.fixture(params=RUNTIMES, ids=lambda runtime: runtime.backend)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if request.param.backend == "tensorflow":
        tensorflow_models.library()
    return request.param


@pytest.fixture
def folder(workshop: Workshop, runtime: Runtime) -> Path:
    """Where the leaky sum lies."""
    version = workshop.version_dir("leaky")
    runtime.leaky(version / runtime.file)
    return version


@pytest.fixture
def leaky(workshop: Workshop, folder: Path, runtime: Runtime) -> Callable[..., Engine]:
    """Loads an instance of it; what is given changes its configuration."""

    def load(**changed: Any) -> Engine:
        return workshop.load(leaky_config(runtime.backend, **changed))

    return load


@pytest.mark.parametrize("direct", [False, True])
def test_a_batch_gives_every_row_what_it_gets_alone(leaky: Callable[..., Engine], direct: bool) -> None:
    together, alone = leaky(direct=direct), leaky()

    for step in range(4):
        rows = [leaky_row(slot, step, slot % 4) for slot in (5, 0, 3, 1)]
        expected = [results(alone, [row])[0] for row in rows]

        assert list(map(raws, expected)) == list(map(raws, results(together, rows)))


def test_a_failing_row_is_alone_with_its_error(leaky: Callable[..., Engine], runtime: Runtime) -> None:
    if not runtime.error:
        pytest.skip("test_openvino_engine.py has a row that fails")
    engine, alone = leaky(), leaky()
    for each in (engine, alone):
        results(each, [leaky_row(slot) for slot in range(3)])

    good, bad, other = engine.run([leaky_row(0, 1), leaky_row(1, 1, index=9), leaky_row(2, 1)], [True] * 3).rows

    assert isinstance(bad, RowError)
    assert "INTERNAL" == bad.code
    assert re.match(runtime.error, bad.message, re.DOTALL)
    expected = results(alone, [leaky_row(0, 1), leaky_row(2, 1)])
    assert not isinstance(good, RowError | None)
    assert not isinstance(other, RowError | None)
    assert list(map(raws, expected)) == [raws(good), raws(other)]
    assert raws(results(engine, [leaky_row(1, 1)])[0]) == raws(results(alone, [leaky_row(1, 1)])[0])


def test_with_fixed_shape_a_row_has_the_same_bits_in_any_company(
    leaky: Callable[..., Engine], runtime: Runtime
) -> None:
    if runtime.backend == "tensorflow":
        pytest.skip("it refuses fixed_shape")
    engine, alone = (leaky(parameters={"fixed_shape": shape}) for shape in ("true", "rows"))
    rows = [leaky_row(slot, 0, slot % 4) for slot in range(8)]
    expected = [raws(results(alone, [row])[0]) for row in rows]
    assert isinstance(engine, FixesShape)
    assert isinstance(alone, FixesShape)

    assert engine.batch_rows > 1 == alone.batch_rows
    for size in range(1, 9):
        assert expected[:size] == list(map(raws, results(engine, rows[:size])))


def test_a_sequence_resumed_from_a_checkpoint_goes_on_as_if_never_stopped(leaky: Callable[..., Engine]) -> None:
    first, second = leaky(), leaky()
    before = [results(first, [leaky_row(2, step)])[0] for step in range(3)]
    second.load_states([6], [before[-1].states])

    assert raws(results(first, [leaky_row(2, 3)])[0]) == raws(results(second, [Row(leaky_row(2, 3).inputs, slot=6)])[0])


def test_what_a_model_returned_is_not_changed_by_a_later_call(leaky: Callable[..., Engine]) -> None:
    """Tensors are lent to the session, and taken over from it, without copies."""
    engine = leaky()
    (first,) = results(engine, [leaky_row(1, 0)])
    before = raws(first)
    for step in range(1, 50):
        results(engine, [leaky_row(1, step), leaky_row(2, step - 1)])

    assert before == raws(first)


REFUSED = [
    ({"inputs": [TensorSpec("x", "FP32", (3,))]}, "configuration expects 2 inputs, model provides 3"),
    (
        {"inputs": [TensorSpec("x", "FP32", (3,)), TensorSpec("at", "INT64", (1,))]},
        "unexpected inference input 'at', allowed inputs are: index, s, x",
    ),
    (
        {"inputs": [TensorSpec("x", "FP64", (3,)), TensorSpec("index", "INT64", (1,))]},
        "configuration expects datatype TYPE_FP64 for input 'x', model provides TYPE_FP32",
    ),
    (
        {"inputs": [TensorSpec("x", "FP32", (4,)), TensorSpec("index", "INT64", (1,))]},
        (
            "(an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            "complete shape [-1,4])"
        ),
    ),
    (
        {"outputs": [TensorSpec("z", "FP32", (3,))]},
        "unexpected inference output 'z', allowed outputs are: s_next, y",
    ),
    ({"states": [StateSpec("s", "later", "FP32", (3,))]}, "unexpected inference output 'later'"),
    ({"states": [StateSpec("s", "s_next", "FP32", (5,))]}, "tensor 's': the model expects 2 dimensions (shape [-1,3])"),
    (
        {"controls": [ControlSpec("START", ControlKind.START, "FP32", (0, 1))]},
        "configuration specified sequence control 'START', but model does not provide that input",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_a_model_that_is_not_what_its_configuration_says_is_refused(
    leaky: Callable[..., Engine], changed: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(LoadError) as refused:
        leaky(**changed)

    assert message in refused.value.message


def test_what_is_no_model_is_refused(workshop: Workshop, runtime: Runtime) -> None:
    path = workshop.version_dir("leaky") / runtime.file
    with pytest.raises(LoadError, match=f"unable to find '{path}'"):
        workshop.load(leaky_config(runtime.backend))
    path.write_bytes(b"\x08\x07 no model")
    with pytest.raises(LoadError, match=f"failed to load model '{path}': .*error"):
        workshop.load(leaky_config(runtime.backend))


KINDS = [
    ("FP32", [[1.5, -2.0]], "<f4"),
    ("FP64", [[1e300, 0.1]], "<f8"),
    ("FP16", [[1.5, -0.25]], "<f2"),
    ("INT64", [[-(2**60), 3]], "<i8"),
    ("UINT16", [[65535, 3]], "<u2"),
    ("UINT64", [[2**31 - 1, 3]], "<u8"),
    ("BOOL", [[True, False]], "?"),
    ("BYTES", [["", "grün\n"]], "O"),
    ("BF16", [[1.5, -3.0]], ml_dtypes.bfloat16),
]


def write_identity(runtime: Runtime, path: Path, datatype: str, dims: Sequence[int] = (2,)) -> None:
    """y = x. dims: those of a row, -1 for any size"""
    if runtime.backend == "onnxruntime":
        types = onnx_models.types
        kinds = {"FP32": types.FLOAT, "FP64": types.DOUBLE, "FP16": types.FLOAT16, "BYTES": types.STRING}
        kinds["BF16"] = types.BFLOAT16
        named = [f"size{place}" if dim == -1 else dim for place, dim in enumerate(dims)]
        onnx_models.identity(path, kinds.get(datatype) or getattr(types, datatype), [onnx_models.BATCH, *named])
    elif runtime.backend == "openvino":
        kinds = {"FP32": "f32", "FP64": "f64", "FP16": "f16", "INT64": "i64", "UINT16": "u16", "BOOL": "boolean"}
        kinds["UINT64"] = "u64"
        kinds |= {"BYTES": "string", "BF16": "bf16"}
        openvino_models.identity(path, getattr(openvino_models.ov.Type, kinds[datatype]), [-1, *dims])
    else:
        kinds = {"FP32": "float32", "FP64": "float64", "FP16": "float16", "BYTES": "string", "BF16": "bfloat16"}
        tensorflow_models.identity(
            path, kinds.get(datatype, datatype.lower()), [None, *(None if dim == -1 else dim for dim in dims)]
        )


@pytest.mark.parametrize(("datatype", "values", "dtype"), KINDS, ids=[kind[0] for kind in KINDS])
def test_every_kind_of_tensor_passes(
    workshop: Workshop, runtime: Runtime, datatype: str, values: Any, dtype: Any
) -> None:
    write_identity(runtime, workshop.version_dir("echo") / runtime.file, datatype)
    spec = [TensorSpec("x", datatype, (2,))], [TensorSpec("y", datatype, (2,))]
    engine = workshop.load(plain_config("echo", runtime.backend, inputs=spec[0], outputs=spec[1]))
    if runtime.backend == "openvino" and datatype in ("INT64", "FP64"):
        values = [[-(2**31), 0.5]]  # it computes them in 32 bits
    tensor = wire("x", values, dtype, datatype)

    for rows in (1, 3):
        ran = results(engine, [Row({"x": tensor})] * rows, want_state=False)

        assert [tensor.raw] * rows == [result.outputs[0].raw for result in ran]
        assert {(1, 2)} == {tuple(result.outputs[0].shape) for result in ran}


SIZES = [(1, 3), (2, 2), (1, 1)]
"""Rows of a request, and the size of its variable dimensions."""


@pytest.mark.parametrize("dims", [(-1,), (-1, -1), (2, -1)])
@pytest.mark.parametrize("batched", [True, False])
def test_strings_keep_their_shape_however_many_of_its_dimensions_vary(
    workshop: Workshop, runtime: Runtime, dims: tuple[int, ...], *, batched: bool
) -> None:
    write_identity(runtime, workshop.version_dir("echo") / runtime.file, "BYTES", dims)
    own = dims if batched else (-1, *dims)
    spec = [TensorSpec("x", "BYTES", own)], [TensorSpec("y", "BYTES", own)]
    config = plain_config("echo", runtime.backend, inputs=spec[0], outputs=spec[1], max_batch_size=4 if batched else 0)
    engine = workshop.load(config)
    given = [np.full((rows, *(size if dim == -1 else dim for dim in dims)), str(size), object) for rows, size in SIZES]

    ran = results(engine, [Row({"x": wire("x", array, "O", "BYTES")}) for array in given], want_state=False)

    assert [array.shape for array in given] == [tuple(result.outputs[0].shape) for result in ran]
    assert [wire("x", array, "O", "BYTES").raw for array in given] == [result.outputs[0].raw for result in ran]


# -- completion -------------------------------------------------------------------------------------------------------


def complete(folder: Path, runtime: Runtime, config: Mapping[str, Any]) -> dict[str, Any]:
    told = json.dumps({"name": "leaky", **config})
    return json.loads(find_backend(runtime.backend).auto_complete(told, folder))


def told(entries: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(entry["name"], entry["data_type"], tuple(entry["dims"])) for entry in entries}


def test_a_stateless_model_is_told_by_its_file_alone(folder: Path, runtime: Runtime) -> None:
    found = complete(folder, runtime, {})

    assert 4 == found["max_batch_size"]
    assert {} == found["dynamic_batching"]
    assert {("x", "TYPE_FP32", (3,)), ("index", "TYPE_INT64", (1,)), ("s", "TYPE_FP32", (3,))} == told(found["input"])
    assert {("y", "TYPE_FP32", (3,)), ("s_next", "TYPE_FP32", (3,))} == told(found["output"])


def test_states_and_controls_are_not_declared_once_more(folder: Path, runtime: Runtime) -> None:
    state = {"input_name": "s", "output_name": "s_next", "data_type": "TYPE_FP32", "dims": ["3"]}

    found = complete(folder, runtime, {"max_batch_size": 2, "sequence_batching": {"state": [state]}})

    assert 2 == found["max_batch_size"]
    assert "dynamic_batching" not in found
    assert {"x", "index"} == {entry["name"] for entry in found["input"]}
    assert ["y"] == [entry["name"] for entry in found["output"]]


def test_a_model_without_batches_is_told_as_such(workshop: Workshop, runtime: Runtime) -> None:
    folder = workshop.version_dir("leaky")
    runtime.leaky(folder / runtime.file, 1)

    found = complete(folder, runtime, {})

    assert 0 == found.get("max_batch_size", 0)
    assert ("x", "TYPE_FP32", (1, 3)) in told(found["input"])
    if runtime.backend != "openvino":  # there the batch is made variable
        with pytest.raises(
            ConfigError, match=r"does not support batching while non-zero max_batch_size is specified: .* 'x' \[1,3\]"
        ):
            complete(folder, runtime, {"max_batch_size": 3})
        with pytest.raises(LoadError, match="the first dimension must be -1; but shape expected by the model is"):
            workshop.load(leaky_config(runtime.backend))


def test_what_is_complete_is_left_alone(tmp_path: Path, runtime: Runtime) -> None:
    config = {"input": [{"name": "x"}], "output": [{"name": "y"}]}

    assert {"name": "leaky", **config} == complete(tmp_path, runtime, config)
