"""What is OpenVINO's own; what holds for every runtime is in test_session_engines.py."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from executor.engine.base import Engine, Row, RowError
from executor.engine.openvino.loading import completed
from executor.engine.openvino.session import options_of
from shared.contract.errors import LoadError
from shared.contract.model_config import StateSpec, TensorSpec
from tests.executor.engine import onnx_models, openvino_models
from tests.executor.engine.leaky_sum import leaky_config, leaky_row
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    error,
    fp32,
    fp32_state,
    parameters,
    plain_config,
    raws,
    results,
    sequence_config,
    wire,
)
from tests.executor.engine.openvino_models import op, value
from tests.markdown_pages import all_blocks


def leaky(workshop: Workshop, batch: int = -1, **told: Any) -> Engine:
    openvino_models.leaky_sum(workshop.version_dir("leaky") / "model.xml", batch)
    return workshop.load(leaky_config("openvino"), config_json=json.dumps({"name": "leaky", **told}))


def test_a_failing_row_is_alone_with_its_error(workshop: Workshop) -> None:
    openvino_models.pairs(workshop.version_dir("pairs") / "model.xml")
    engine = workshop.load(plain_config("pairs", "openvino", inputs=[fp32("x", -1)], outputs=[fp32("y", -1, 2)]))
    rows = [Row({"x": wire("x", [values])}) for values in ([1, 2], [3, 4, 5], [6, 7])]

    good, bad, other = engine.run(rows, [False] * 3).rows

    assert isinstance(bad, RowError)
    assert bad.message.startswith("openvino error: ")
    assert not isinstance(good, RowError | None)
    assert not isinstance(other, RowError | None)
    assert [[[[1, 2]]], [[[6, 7]]]] == [array(good, "y").tolist(), array(other, "y").tolist()]


def test_a_model_of_one_row_takes_batches_where_the_configuration_has_them(workshop: Workshop) -> None:
    """As Triton does, unless SKIP_OV_DYNAMIC_BATCHSIZE says not to."""
    fixed, free = leaky(workshop, 1, max_batch_size=8), leaky(workshop)
    rows = [leaky_row(slot, 0, slot % 4) for slot in range(5)]

    assert list(map(raws, results(free, rows))) == list(map(raws, results(fixed, rows)))
    with pytest.raises(LoadError, match="the first dimension must be -1; but shape expected by the model is"):
        leaky(workshop, 1, max_batch_size=8, parameters=parameters(SKIP_OV_DYNAMIC_BATCHSIZE="yes"))


def test_dims_of_the_configuration_are_taken_over_where_it_says_so(workshop: Workshop) -> None:
    path = workshop.version_dir("wide") / "model.xml"
    x = value("x", np.float32, [1, 3])
    openvino_models.save(path, [x], {"y": op.add(x, np.float32(1))})
    config = plain_config("wide", "openvino", inputs=[fp32("x", 5)], outputs=[fp32("y", 5)])
    told = {"max_batch_size": 8, "input": [{"name": "x", "dims": ["5"]}]}

    with pytest.raises(LoadError, match=r"the model expects 2 dimensions \(shape \[-1,3\]\)"):
        workshop.load(config, config_json=json.dumps(told))
    engine = workshop.load(config, config_json=json.dumps({**told, "parameters": parameters(RESHAPE_IO_LAYERS="YES")}))

    (result,) = results(engine, [Row({"x": wire("x", [[1, 2, 3, 4, 5]])})], want_state=False)
    assert [[2, 3, 4, 5, 6]] == array(result, "y").tolist()


def test_shapes_that_the_model_cannot_have_are_refused(workshop: Workshop) -> None:
    path = workshop.version_dir("wide") / "model.xml"
    x = value("x", np.float32, [2, 3])
    openvino_models.save(
        path, [x], {"y": op.matmul(x, np.ones((3, 2), np.float32), transpose_a=False, transpose_b=False)}
    )
    config = plain_config("wide", "openvino", inputs=[fp32("x", 5)], outputs=[fp32("y", 2)])
    told = {"name": "wide", "max_batch_size": 8, "input": [{"name": "x", "dims": ["5"]}]}

    with pytest.raises(LoadError, match="unable to load model 'wide': it cannot have the shapes of its configuration"):
        workshop.load(config, config_json=json.dumps({**told, "parameters": parameters(RESHAPE_IO_LAYERS="YES")}))


def test_scalars_are_one_element(workshop: Workshop) -> None:
    x, scale = value("x", np.float32, [-1]), value("scale", np.float32, [])
    scaled = op.multiply(x, scale)
    total = op.reduce_sum(scaled, np.array([0]), keep_dims=False)
    openvino_models.save(workshop.version_dir("odd") / "model.xml", [x, scale], {"y": scaled, "total": total})
    engine = workshop.load(
        plain_config(
            "odd",
            "openvino",
            inputs=[fp32("x", -1), fp32("scale", 1)],
            outputs=[fp32("y", -1), fp32("total", 1)],
            max_batch_size=0,
        )
    )

    (result,) = results(engine, [Row({"x": wire("x", [1, 2, 3]), "scale": wire("scale", [2])})], want_state=False)

    assert [[2, 4, 6], [12]] == [array(result, "y").tolist(), array(result, "total").tolist()]


def test_an_output_may_be_the_next_state(workshop: Workshop) -> None:
    openvino_models.tanh_cell(workshop.version_dir("cell") / "model.xml")
    engine = workshop.load(
        sequence_config("cell", "openvino", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)], states=[fp32_state("s", 1)])
    )

    (first,) = results(engine, [Row({"x": wire("x", [[1]])}, slot=0, start=True)])
    (second,) = results(engine, [Row({"x": wire("x", [[1]])}, slot=0)])

    assert [np.tanh(1), np.tanh(1 + np.tanh(1))] == pytest.approx([array(first, "y").item(), array(second, "y").item()])


def test_a_model_that_keeps_state_in_itself_serves_no_sequences(workshop: Workshop) -> None:
    openvino_models.keeps_its_sum(workshop.version_dir("sum") / "model.xml")
    told: dict[str, Any] = {"inputs": [fp32("x", 1)], "outputs": [fp32("y", 1)]}

    with pytest.raises(LoadError, match=r"it keeps 'total' in itself, .*docs/guides/backends.md has"):
        workshop.load(sequence_config("sum", "openvino", **told))


def test_what_the_guide_makes_of_a_model_that_keeps_state_in_itself_serves_sequences(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workshop.version_dir("sum")
    openvino_models.keeps_its_sum(folder / "stateful.xml")
    program = next(block.text for block in all_blocks() if '"stateful.xml"' in block.text)
    monkeypatch.chdir(folder)
    exec(program, {})
    engine = workshop.load(
        sequence_config(
            "sum", "openvino", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)], states=[fp32_state("total", 1)]
        )
    )

    def totals(start: bool) -> list[float]:
        rows = [Row({"x": wire("x", [[slot + 1]])}, slot=slot, start=start) for slot in (0, 1)]
        return [array(row, "y").item() for row in results(engine, rows)]

    assert [[1, 2], [2, 4]] == [totals(start=True), totals(start=False)]


def test_a_number_beyond_32_bits_fails_its_row(workshop: Workshop) -> None:
    """OpenVINO would compute with its lower half, and say nothing."""
    failed = error(leaky(workshop), leaky_row(1, index=2**31))

    assert "OpenVINO computes INT64 in 32 bits, and a value does not fit" in failed.message


def test_a_text_that_openvino_would_shorten_fails_its_row(workshop: Workshop) -> None:
    openvino_models.identity(workshop.version_dir("echo") / "model.xml", openvino_models.ov.Type.string, [-1, 1])
    spec = [TensorSpec("x", "BYTES", (1,))], [TensorSpec("y", "BYTES", (1,))]
    engine = workshop.load(plain_config("echo", "openvino", inputs=spec[0], outputs=spec[1]))

    assert "ends in a NUL character" in error(engine, Row({"x": wire("x", [["a\0"]], "O", "BYTES")})).message


def test_an_operation_that_copies_strings_byte_by_byte_is_refused(workshop: Workshop) -> None:
    """Two strings would own one text, and the executor would end when both are freed, or hold other texts before."""
    x = value("x", openvino_models.ov.Type.string, [-1, 3])
    first, last, one = (np.array([place], np.int64) for place in (0, 2, 1))
    y = op.concat([op.slice(op.concat([x, x], 1), first, last, one, one), x], 1)
    openvino_models.save(workshop.version_dir("cut") / "model.xml", [x], {"y": y})
    spec = [TensorSpec("x", "BYTES", (3,))], [TensorSpec("y", "BYTES", (5,))]

    with pytest.raises(LoadError, match="OpenVINO cannot take strings through the operation Slice"):
        workshop.load(plain_config("cut", "openvino", inputs=spec[0], outputs=spec[1]))


def test_sums_of_64_bits_are_told_of_at_load(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    """OpenVINO wraps them around at 32 bits, which nobody can see in the result."""
    x, s = (value(name, np.int64, [-1, 1]) for name in ("x", "s"))
    openvino_models.save(workshop.version_dir("sum") / "model.xml", [x, s], {"s_next": op.add(x, s)})
    states = [StateSpec("s", "s_next", "INT64", (1,))]
    spec = [TensorSpec("x", "INT64", (1,))], [TensorSpec("s_next", "INT64", (1,))]
    workshop.load(sequence_config("sum", "openvino", inputs=spec[0], outputs=spec[1], states=states))

    assert "model 'sum': OpenVINO computes 64 bits in 32: s_next" in caplog.text


def test_strings_of_unequal_length_take_no_more_memory_than_they_are_long(workshop: Workshop) -> None:
    openvino_models.identity(workshop.version_dir("echo") / "model.xml", openvino_models.ov.Type.string, [-1, -1])
    spec = [TensorSpec("x", "BYTES", (-1,))], [TensorSpec("y", "BYTES", (-1,))]
    engine = workshop.load(plain_config("echo", "openvino", inputs=spec[0], outputs=spec[1]))
    texts = ["ä" * 100_000, "", "b\0c", *["d"] * 1_000]

    tracemalloc.start()
    (result,) = results(engine, [Row({"x": wire("x", [texts], "O", "BYTES")})])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [text.encode() for text in texts] == array(result, "y")[0].tolist()
    # As one array of OpenVINO's they are 400 MB.
    assert peak < 20_000_000


def test_less_precision_than_declared_is_told(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    openvino_models.identity(workshop.version_dir("echo") / "model.xml", np.float64, [-1, 2])
    spec = [TensorSpec("x", "FP64", (2,))], [TensorSpec("y", "FP64", (2,))]
    with caplog.at_level(logging.WARNING):
        workshop.load(plain_config("echo", "openvino", inputs=spec[0], outputs=spec[1]))

    assert "model 'echo': OpenVINO computes 64 bits in 32: x, y" in caplog.text


def test_other_formats_are_read_under_their_names(workshop: Workshop) -> None:
    folder = workshop.version_dir("leaky")
    onnx_models.leaky_sum(folder / "model.onnx")

    found = json.loads(completed('{"name": "leaky", "default_model_filename": "model.onnx"}', folder))

    assert {"x", "index", "s"} == {entry["name"] for entry in found["input"]}


def test_a_tensor_is_found_by_any_of_its_names(workshop: Workshop) -> None:
    path = workshop.version_dir("named") / "model.xml"
    x = value("x", np.float32, [-1, 2])
    x.output(0).set_names({"x", "x:0"})
    openvino_models.save(path, [x], {"y": op.add(x, np.float32(1))})
    inputs, outputs = [TensorSpec("x:0", "FP32", (2,))], [fp32("y", 2)]

    engine = workshop.load(
        plain_config("named", "openvino", inputs=inputs, outputs=outputs),
        config_json=json.dumps({"input": [{"name": "x:0"}]}),
    )

    (result,) = results(engine, [Row({"x:0": wire("x:0", [[1, 2]])})], want_state=False)
    assert [[2, 3]] == array(result, "y").tolist()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"EXECUTION_MODE_HINT": "ACCURACY"}),
        ({"HINT_BF16": "YES"}, {"INFERENCE_PRECISION_HINT": "bf16"}),
        (
            {"NUM_STREAMS": "auto", "INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "Throughput"},
            {
                "EXECUTION_MODE_HINT": "ACCURACY",
                "NUM_STREAMS": "AUTO",
                "INFERENCE_NUM_THREADS": "2",
                "PERFORMANCE_HINT": "THROUGHPUT",
            },
        ),
    ],
)
def test_settings_reach_openvino(workshop: Workshop, given: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert expected == options_of({"parameters": parameters(**given)}, fixed_threads=0)
    leaky(workshop, parameters=parameters(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"INFERENCE_NUM_THREADS": "many"}, "'INFERENCE_NUM_THREADS' to be a non-negative number, got MANY"),
        ({"NUM_STREAMS": "-1"}, "'NUM_STREAMS' to be a non-negative number or AUTO/NUMA, got -1"),
        ({"PERFORMANCE_HINT": "fast"}, "'PERFORMANCE_HINT' to be either LATENCY or THROUGHPUT, got FAST"),
        ({"CPU_EXTENSION_PATH": "/nowhere.so"}, "failed to load the CPU extension '/nowhere.so'"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(workshop: Workshop, given: Mapping[str, str], message: str) -> None:
    with pytest.raises(LoadError) as refused:
        leaky(workshop, parameters=parameters(**given))

    assert message in refused.value.message


def test_a_file_of_a_format_that_is_too_new_is_refused(workshop: Workshop) -> None:
    path = openvino_models.leaky_sum(workshop.version_dir("leaky") / "model.xml")
    text = path.read_text()
    assert 'version="11"' in text
    path.write_text(text.replace('version="11"', 'version="99"', 1))

    with pytest.raises(LoadError, match="failed to load model"):
        workshop.load(leaky_config("openvino"))


def test_a_gpu_is_refused_with_the_remedy(workshop: Workshop) -> None:
    workshop.device = "cuda:0"
    with pytest.raises(LoadError, match="openVINO backend supports only CPU device; give it an instance_group"):
        leaky(workshop)
