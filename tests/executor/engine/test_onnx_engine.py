"""What is ONNX Runtime's own; what holds for every runtime is in test_session_engines.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch

from executor.engine.base import Engine, Row
from executor.engine.onnx.forward import compute_of
from executor.engine.onnx.session import OnnxModel, open_model
from executor.engine.pytorch.state_values import Texts
from executor.engine.sessions.checks import SessionCall, checked_call
from shared.contract.errors import LoadError
from shared.contract.model_config import ControlKind, ControlSpec, ModelConfig, TensorSpec
from tests.executor.engine import onnx_models
from tests.executor.engine.leaky_sum import leaky_config, leaky_row
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    fp32,
    fp32_state,
    plain_config,
    results,
    sequence_config,
    wire,
)
from tests.executor.engine.onnx_models import BATCH, BOOL, FLOAT, STRING, node, value


def leaky(workshop: Workshop, config: ModelConfig | None = None, parameters: Mapping[str, str] | None = None) -> Engine:
    onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    told = {"name": "leaky", "parameters": {name: {"string_value": text} for name, text in (parameters or {}).items()}}
    return workshop.load(config or leaky_config("onnxruntime"), config_json=json.dumps(told))


def two_echoes(workshop: Workshop, kind: int) -> OnnxModel:
    """Strings beside tensors of another kind."""
    path = workshop.version_dir("echoes") / "model.onnx"
    kinds = (STRING, kind)
    inputs, outputs = ([value(f"{name}{at}", each, [BATCH, 1]) for at, each in enumerate(kinds)] for name in "xy")
    onnx_models.save(path, [node("Identity", [f"x{at}"], [f"y{at}"]) for at in (0, 1)], inputs, outputs)
    return open_model(path, {})


def echoes_call(model: OnnxModel, datatype: str) -> SessionCall:
    inputs, outputs = ([TensorSpec(f"{name}0", "BYTES", (1,)), TensorSpec(f"{name}1", datatype, (1,))] for name in "xy")
    return checked_call(plain_config("echoes", "onnxruntime", inputs=inputs, outputs=outputs), model.signature)


def test_a_model_with_strings_is_called_without_io_binding_on_a_gpu_too(workshop: Workshop) -> None:
    model = two_echoes(workshop, FLOAT)
    compute = compute_of(model, echoes_call(model, "FP32"), torch.device("cuda"), None)

    found = compute({"x0": Texts(["a"], (1, 1)), "x1": torch.tensor([[2.5]])})

    assert ["a"] == found["y0"]
    assert torch.equal(torch.tensor([[2.5]]), cast("torch.Tensor", found["y1"]))


def test_a_classifier_whose_probabilities_are_no_tensor_is_refused_with_the_remedy(workshop: Workshop) -> None:
    onnx_models.classifier(workshop.version_dir("classifier") / "model.onnx")
    told: dict[str, Any] = {"inputs": [fp32("x", 2)], "outputs": [fp32("probabilities", 2)]}

    with pytest.raises(LoadError, match=r"which no request can carry; .*skl2onnx: options={'zipmap': False}"):
        workshop.load(plain_config("classifier", "onnxruntime", **told))


def test_strings_beside_bf16_are_refused(workshop: Workshop) -> None:
    model = two_echoes(workshop, onnx_models.BFLOAT16)

    with pytest.raises(LoadError, match="the model has strings and BF16"):
        compute_of(model, echoes_call(model, "BF16"), torch.device("cpu"), None)


def test_a_quantized_model_answers_a_sequence_by_its_own_numbers(workshop: Workshop) -> None:
    """Not by the largest number of who shares its batch."""
    onnx_models.quantized_sum(workshop.version_dir("leaky") / "model.onnx")
    engine = workshop.load(leaky_config("onnxruntime", inputs=[fp32("x", 3)]))
    small, large = ([[1.0, 2.0, 3.0]], [[1e6, 2e6, 3e6]])

    (found, _) = results(engine, [Row({"x": wire("x", x)}, slot=at, start=True) for at, x in enumerate((small, large))])

    np.testing.assert_allclose(array(found, "y"), small, atol=0.02)


def test_controls_reach_the_model(workshop: Workshop) -> None:
    path = workshop.version_dir("told") / "model.onnx"
    nodes = [node("Where", ["START", "x", "s"], ["s_next"]), node("Identity", ["s_next"], ["y"])]
    inputs = [value("x", FLOAT, [BATCH, 1]), value("START", BOOL, [BATCH, 1]), value("s", FLOAT, [BATCH, 1])]
    onnx_models.save(path, nodes, inputs, [value("y", FLOAT, [BATCH, 1]), value("s_next", FLOAT, [BATCH, 1])])
    engine = workshop.load(
        sequence_config(
            "told",
            "onnxruntime",
            inputs=[fp32("x", 1)],
            outputs=[fp32("y", 1)],
            states=[fp32_state("s", 1)],
            controls=[ControlSpec("START", ControlKind.START, "BOOL", (0, 1))],
        )
    )

    def row(number: float, *, start: bool) -> Row:
        control = wire("START", [[start]], "?", "BOOL")
        return Row({"x": wire("x", [[number]])}, {"START": control}, slot=3, start=start)

    told = [array(results(engine, [row(7 + step, start=step == 0)])[0], "y").item() for step in range(3)]
    assert [7, 7, 7] == told


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
            inputs=[fp32("x", -1), fp32("scale", 1), fp32("by", 1, optional=True)],
            outputs=[fp32("y", -1), fp32("total", 1)],
            max_batch_size=0,
        )
    )
    given = {"x": wire("x", [1, 2, 3]), "scale": wire("scale", [2])}

    (own,) = results(engine, [Row(given)], want_state=False)
    (told,) = results(engine, [Row({**given, "by": wire("by", [1])})], want_state=False)

    assert [[102, 104, 106], [312]] == [array(own, "y").tolist(), array(own, "total").tolist()]
    assert [[3, 5, 7], [15]] == [array(told, "y").tolist(), array(told, "total").tolist()]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"execution_mode": "2"}, "Expected values for  execution_mode are 0 or 1 but got 2"),
        ({"intra_op_thread_count": "many"}, "parameter intra_op_thread_count must be a number, not 'many'"),
        ({"enable_mem_arena": "perhaps"}, "parameter enable_mem_arena must be true or false, not 'perhaps'"),
    ],
)
@pytest.mark.parametrize("fixed_shape", ["false", "true"])
def test_a_setting_that_means_nothing_is_refused(
    workshop: Workshop, parameters: Mapping[str, str], message: str, fixed_shape: str
) -> None:
    with pytest.raises(LoadError) as refused:
        leaky(workshop, leaky_config("onnxruntime", parameters={"fixed_shape": fixed_shape}), parameters)

    assert message in refused.value.message


def test_a_negative_number_of_threads_is_that_of_the_default(workshop: Workshop) -> None:
    """As Triton reads it; with fixed_shape the default is one."""
    config, parameters = (
        leaky_config("onnxruntime", parameters={"fixed_shape": "true"}),
        {"intra_op_thread_count": "-5"},
    )

    results(leaky(workshop, config, parameters), [leaky_row(0)])


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


def test_a_gpu_without_a_runtime_for_it_is_refused_with_the_remedy(workshop: Workshop) -> None:
    path = onnx_models.leaky_sum(workshop.version_dir("leaky") / "model.onnx")
    with pytest.raises(LoadError, match=r"install onnxruntime-gpu in its place, or give the model an instance_group"):
        open_model(path, {"name": "leaky"}, "cuda:0")
