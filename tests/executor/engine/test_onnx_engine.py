"""ONNX models: batches equal single rows, states stay with their sequence, and what does not fit is told at load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import pytest

from executor.engine.base import Engine, FixesShape, Row, RowError
from executor.engine.onnx.loading import completed
from executor.engine.onnx.session import open_model
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import ControlKind, ControlSpec, ModelConfig, StateSpec, TensorSpec
from tests.executor.engine import onnx_models
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    error,
    plain_config,
    raws,
    results,
    sequence_config,
    wire,
)
from tests.executor.engine.onnx_models import BATCH, BFLOAT16, BOOL, DOUBLE, FLOAT, INT64, STRING, node, value

LEAKY = StateSpec("s", "s_next", "FP32", (3,))


def leaky_config(*, direct: bool = False, max_batch_size: int = 8, **changed: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "inputs": [TensorSpec("x", "FP32", (3,)), TensorSpec("index", "INT64", (1,))],
        "outputs": [TensorSpec("y", "FP32", (3,))],
        "states": [LEAKY],
        **changed,
    }
    return sequence_config("leaky", "onnxruntime", direct=direct, max_batch_size=max_batch_size, **given)


def leaky(workshop: Workshop, config: ModelConfig | None = None, parameters: Mapping[str, str] | None = None) -> Engine:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    told = {"name": "leaky", "parameters": {name: {"string_value": text} for name, text in (parameters or {}).items()}}
    return workshop.load(config or leaky_config(), config_json=json.dumps(told))


def leaky_row(slot: int, step: int, index: int = 0) -> Row:
    x, at = wire("x", [[slot + step / 8, -slot, step]]), wire("index", [[index]], "<i8")
    return Row({"x": x, "index": at}, slot=slot, start=step == 0)


@pytest.mark.parametrize("direct", [False, True])
def test_a_batch_gives_every_row_what_it_gets_alone(workshop: Workshop, direct: bool) -> None:
    together, alone = leaky(workshop, leaky_config(direct=direct)), leaky(workshop)

    for step in range(4):
        rows = [leaky_row(slot, step, slot % 4) for slot in (5, 0, 3, 1)]
        expected = [results(alone, [row])[0] for row in rows]

        assert list(map(raws, expected)) == list(map(raws, results(together, rows)))


def test_a_sequence_resumed_from_a_checkpoint_goes_on_as_if_never_stopped(workshop: Workshop) -> None:
    first, second = leaky(workshop), leaky(workshop)
    before = [results(first, [leaky_row(2, step)])[0] for step in range(3)]
    second.load_states([6], [before[-1].states])

    assert raws(results(first, [leaky_row(2, 3)])[0]) == raws(results(second, [Row(leaky_row(2, 3).inputs, slot=6)])[0])


def test_what_a_model_returned_is_not_changed_by_a_later_call(workshop: Workshop) -> None:
    """Tensors are lent to the session, and taken over from it, without copies."""
    engine = leaky(workshop)
    (first,) = results(engine, [leaky_row(1, 0)])
    before = raws(first)
    for step in range(1, 50):
        results(engine, [leaky_row(1, step), leaky_row(2, step - 1)])

    assert before == raws(first)


def test_a_failing_row_is_alone_with_its_error(workshop: Workshop) -> None:
    engine, alone = leaky(workshop), leaky(workshop)
    for each in (engine, alone):
        results(each, [leaky_row(0, 0), leaky_row(1, 0), leaky_row(2, 0)])

    good, bad, other = engine.run([leaky_row(0, 1), leaky_row(1, 1, index=9), leaky_row(2, 1)], [True] * 3).rows

    assert isinstance(bad, RowError)
    assert bad.message.startswith("onnx runtime error: ")
    assert "indices element out of data bounds" in bad.message
    expected = results(alone, [leaky_row(0, 1), leaky_row(2, 1)])
    assert not isinstance(good, RowError | None)
    assert not isinstance(other, RowError | None)
    assert list(map(raws, expected)) == [raws(good), raws(other)]
    assert raws(results(engine, [leaky_row(1, 1)])[0]) == raws(results(alone, [leaky_row(1, 1)])[0])


def test_controls_reach_the_model(workshop: Workshop) -> None:
    path = workshop.version_dir("told") / "model.onnx"
    nodes = [node("Where", ["START", "x", "s"], ["s_next"]), node("Identity", ["s_next"], ["y"])]
    inputs = [value("x", FLOAT, [BATCH, 1]), value("START", BOOL, [BATCH, 1]), value("s", FLOAT, [BATCH, 1])]
    onnx_models.save(path, nodes, inputs, [value("y", FLOAT, [BATCH, 1]), value("s_next", FLOAT, [BATCH, 1])])
    engine = workshop.load(
        sequence_config(
            "told",
            "onnxruntime",
            inputs=[TensorSpec("x", "FP32", (1,))],
            outputs=[TensorSpec("y", "FP32", (1,))],
            states=[StateSpec("s", "s_next", "FP32", (1,))],
            controls=[ControlSpec("START", ControlKind.START, "BOOL", (0, 1))],
        )
    )

    def row(number: float, *, start: bool) -> Row:
        control = wire("START", [[start]], "?", "BOOL")
        return Row({"x": wire("x", [[number]])}, {"START": control}, slot=3, start=start)

    told = [array(results(engine, [row(7 + step, start=step == 0)])[0], "y").item() for step in range(3)]
    assert [7, 7, 7] == told


@pytest.mark.parametrize(
    ("kind", "datatype", "values", "dtype"),
    [
        (FLOAT, "FP32", [[1.5, -2.0]], "<f4"),
        (DOUBLE, "FP64", [[1e300, 0.1]], "<f8"),
        (INT64, "INT64", [[-(2**60), 3]], "<i8"),
        (BOOL, "BOOL", [[True, False]], "?"),
        (STRING, "BYTES", [["", "grün\n"]], "O"),
        (BFLOAT16, "BF16", [[1.5, -3.0]], ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_kind_of_tensor_passes(
    workshop: Workshop, kind: int, datatype: str, values: Any, dtype: Any, rows: int
) -> None:
    onnx_models.identity(workshop.version_dir("echo") / "model.onnx", kind, [BATCH, 2])
    spec = [TensorSpec("x", datatype, (2,))], [TensorSpec("y", datatype, (2,))]
    engine = workshop.load(plain_config("echo", "onnxruntime", inputs=spec[0], outputs=spec[1]))
    tensor = wire("x", values, dtype, datatype)

    ran = results(engine, [Row({"x": tensor})] * rows, want_state=False)

    assert [tensor.raw] * rows == [result.outputs[0].raw for result in ran]
    assert {(1, 2)} == {tuple(result.outputs[0].shape) for result in ran}


def test_scalars_and_inputs_with_a_value_of_their_own(workshop: Workshop) -> None:
    """A model without batches; the configuration says [1] for a scalar."""
    path = workshop.version_dir("odd") / "model.onnx"
    nodes = [node("Mul", ["x", "scale"], ["scaled"]), node("Add", ["scaled", "by"], ["y"])]
    inputs = [value("x", FLOAT, ["n"]), value("scale", FLOAT, []), value("by", FLOAT, [1])]
    onnx_models.save(
        path,
        [*nodes, node("ReduceSum", ["y"], ["total"], keepdims=0)],
        inputs,
        [value("y", FLOAT, ["n"]), value("total", FLOAT, [])],
        [onnx_models.constant("by", FLOAT, [1], [100.0])],
    )
    engine = workshop.load(
        plain_config(
            "odd",
            "onnxruntime",
            inputs=[
                TensorSpec("x", "FP32", (-1,)),
                TensorSpec("scale", "FP32", (1,)),
                TensorSpec("by", "FP32", (1,), optional=True),
            ],
            outputs=[TensorSpec("y", "FP32", (-1,)), TensorSpec("total", "FP32", (1,))],
            max_batch_size=0,
        )
    )
    given = {"x": wire("x", [1, 2, 3]), "scale": wire("scale", [2])}

    (own,) = results(engine, [Row(given)], want_state=False)
    (told,) = results(engine, [Row({**given, "by": wire("by", [1])})], want_state=False)

    assert [[102, 104, 106], [312]] == [array(own, "y").tolist(), array(own, "total").tolist()]
    assert [[3, 5, 7], [15]] == [array(told, "y").tolist(), array(told, "total").tolist()]


def test_with_fixed_shape_a_row_has_the_same_bits_in_any_company(workshop: Workshop) -> None:
    engine = leaky(workshop, leaky_config(parameters={"fixed_shape": "true"}))
    alone = leaky(workshop, leaky_config(parameters={"fixed_shape": "rows"}))
    rows = [leaky_row(slot, 0, slot % 4) for slot in range(8)]
    expected = [raws(results(alone, [row])[0]) for row in rows]
    assert isinstance(engine, FixesShape)
    assert isinstance(alone, FixesShape)

    assert engine.batch_rows > 1 == alone.batch_rows
    for size in range(1, 9):
        assert expected[:size] == list(map(raws, results(engine, rows[:size])))


# -- what the configuration says, and what the model is ---------------------------------------------------------------

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
    workshop: Workshop, changed: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(LoadError) as refused:
        leaky(workshop, leaky_config(**changed))

    assert message in refused.value.message


def test_a_model_without_a_variable_batch_is_refused_with_a_batch_size(workshop: Workshop) -> None:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx", batch=1)

    with pytest.raises(LoadError, match="the first dimension must be -1; but shape expected by the model is"):
        workshop.load(leaky_config())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"execution_mode": "2"}, "Expected values for  execution_mode are 0 or 1 but got 2"),
        ({"intra_op_thread_count": "many"}, "parameter intra_op_thread_count must be a number, not 'many'"),
        ({"enable_mem_arena": "perhaps"}, "parameter enable_mem_arena must be true or false, not 'perhaps'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(
    workshop: Workshop, parameters: Mapping[str, str], message: str
) -> None:
    with pytest.raises(LoadError) as refused:
        leaky(workshop, parameters=parameters)

    assert message in refused.value.message


def test_settings_reach_the_session(workshop: Workshop) -> None:
    path = onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    parameters = {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "false",
    }
    config = {
        "optimization": {"graph": {"level": "1"}},
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }

    options = open_model(path, config).session.get_session_options()

    assert [3, 2] == [options.intra_op_num_threads, options.inter_op_num_threads]
    assert ["ORT_ENABLE_EXTENDED", "ORT_PARALLEL"] == [
        options.graph_optimization_level.name,
        options.execution_mode.name,
    ]
    assert [False, False] == [options.enable_cpu_mem_arena, options.enable_mem_pattern]


@pytest.mark.parametrize(
    ("level", "name"), [(-1, "ORT_ENABLE_BASIC"), (2, "ORT_DISABLE_ALL"), (0, "ORT_ENABLE_ALL"), (7, "ORT_ENABLE_ALL")]
)
def test_graph_levels_are_triton_s(workshop: Workshop, level: int, name: str) -> None:
    path = onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")

    model = open_model(path, {"optimization": {"graph": {"level": level}}})

    assert name == model.session.get_session_options().graph_optimization_level.name


def test_what_is_no_model_is_refused(workshop: Workshop) -> None:
    (workshop.version_dir("leaky") / "model.onnx").write_bytes(b"\x08\x07 no model")
    with pytest.raises(LoadError, match="failed to load model"):
        workshop.load(leaky_config())


def test_a_gpu_without_a_runtime_for_it_is_refused_with_the_remedy(workshop: Workshop) -> None:
    path = onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    with pytest.raises(LoadError, match=r"install onnxruntime-gpu in its place, or give the model an instance_group"):
        open_model(path, {"name": "leaky"}, "cuda:0")


# -- completion -------------------------------------------------------------------------------------------------------


def complete(workshop: Workshop, config: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(completed(json.dumps({"name": "leaky", **config}), workshop.version_dir("leaky")))


def test_a_stateless_model_is_told_by_its_file_alone(workshop: Workshop) -> None:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")

    found = complete(workshop, {})

    assert 4 == found["max_batch_size"]
    assert {} == found["dynamic_batching"]
    assert [("x", "TYPE_FP32", [3]), ("index", "TYPE_INT64", [1]), ("s", "TYPE_FP32", [3])] == told(found["input"])
    assert [("y", "TYPE_FP32", [3]), ("s_next", "TYPE_FP32", [3])] == told(found["output"])


def test_states_and_controls_are_not_declared_once_more(workshop: Workshop) -> None:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    state = {"input_name": "s", "output_name": "s_next", "data_type": "TYPE_FP32", "dims": ["3"]}

    found = complete(workshop, {"max_batch_size": 2, "sequence_batching": {"state": [state]}})

    assert 2 == found["max_batch_size"]
    assert "dynamic_batching" not in found
    assert ["x", "index"] == [entry["name"] for entry in found["input"]]
    assert ["y"] == [entry["name"] for entry in found["output"]]


def test_a_model_without_batches_is_told_as_such(workshop: Workshop) -> None:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx", batch=1)

    found = complete(workshop, {})

    assert 0 == found.get("max_batch_size", 0)
    assert ("x", "TYPE_FP32", [1, 3]) == told(found["input"])[0]
    with pytest.raises(ConfigError, match="model does not support batching while non-zero max_batch_size is specified"):
        complete(workshop, {"max_batch_size": 3})


def test_what_is_complete_is_left_alone(workshop: Workshop) -> None:
    config = {"input": [{"name": "x"}], "output": [{"name": "y"}]}

    assert {"name": "leaky", **config} == complete(workshop, config)


def told(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[int]]]:
    return [(entry["name"], entry["data_type"], entry["dims"]) for entry in entries]


def test_an_error_of_one_row_names_the_runtime(workshop: Workshop) -> None:
    assert error(leaky(workshop), leaky_row(0, 0, index=77)).code == "INTERNAL"
