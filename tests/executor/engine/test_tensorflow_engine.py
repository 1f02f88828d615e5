"""What is TensorFlow's own; what holds for every runtime is in test_session_engines.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from executor.engine.base import Engine, Row
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from tests.executor.engine import tensorflow_models
from tests.executor.engine.leaky_sum import leaky_config, leaky_row
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    error,
    fp32,
    fp32_state,
    parameters,
    plain_config,
    results,
    sequence_config,
    wire,
)

STATE = fp32_state("s", 3)


@pytest.fixture(autouse=True)
def library() -> Any:
    return tensorflow_models.library()


def leaky(workshop: Workshop, signature: str = "serving_default", **told: Any) -> Engine:
    tensorflow_models.leaky_sum(workshop.version_dir("leaky") / "model.savedmodel", signature=signature)
    return workshop.load(leaky_config("tensorflow"), config_json=json.dumps({"name": "leaky", **told}))


def plus(number: float) -> Any:
    """A function of `x`, whose result `y` is that much larger."""

    def step(x: Any) -> Any:
        return {"y": x + number}

    return step


def test_a_tensor_whose_rank_the_model_leaves_open_has_that_of_the_configuration(workshop: Workshop) -> None:
    folder = workshop.version_dir("echo")
    tensorflow_models.identity(folder / "model.savedmodel", "float32", None)
    spec = [fp32("x", 2, 1)], [fp32("y", 2, 1)]
    engine = workshop.load(plain_config("echo", "tensorflow", inputs=spec[0], outputs=spec[1]))

    (result,) = results(engine, [Row({"x": wire("x", [[[1], [2]]])})], want_state=False)

    assert [[[1], [2]]] == array(result, "y").tolist()
    from executor.engine.tensorflow.loading import completed  # noqa: PLC0415

    with pytest.raises(ConfigError, match="does not say how many dimensions its input 'x' has"):
        completed('{"name": "echo"}', folder)


def test_strings_are_a_state(workshop: Workshop, library: Any) -> None:
    def join(x: Any, s: Any) -> Any:
        return {"y": library.strings.length(s), "s_next": library.strings.join([s, x])}

    text = (library.string, [None, 1])
    tensorflow_models.save(
        workshop.version_dir("text") / "model.savedmodel", {"serving_default": (join, {"x": text, "s": text})}
    )
    engine = workshop.load(
        sequence_config(
            "text",
            "tensorflow",
            inputs=[TensorSpec("x", "BYTES", (1,))],
            outputs=[TensorSpec("y", "INT32", (1,))],
            states=[StateSpec("s", "s_next", "BYTES", (1,))],
        )
    )

    def row(slot: int, word: str, *, start: bool = False) -> Row:
        return Row({"x": wire("x", [[word]], "O", "BYTES")}, slot=slot, start=start)

    results(engine, [row(0, "ab", start=True), row(1, "grün", start=True)])
    ran = results(engine, [row(0, "c"), row(1, "")])

    assert [2, 5] == [array(result, "y").item() for result in ran]


def test_the_only_signature_needs_no_name(workshop: Workshop) -> None:
    results(leaky(workshop, "step"), [leaky_row(0)])


@pytest.mark.parametrize(
    ("signatures", "wanted", "message"),
    [
        (
            ("a", "b"),
            "",
            "expected 'serving_default' signature; the model has 'a', 'b', and the parameter TF_SIGNATURE",
        ),
        (("a",), "b", "unable to load model 'leaky', expected 'b' signature; the model has 'a'"),
    ],
)
def test_a_signature_that_is_missing_is_told(
    workshop: Workshop, library: Any, signatures: tuple[str, ...], wanted: str, message: str
) -> None:
    function = plus(0), {"x": (library.float32, [None, 1])}
    path = workshop.version_dir("leaky") / "model.savedmodel"
    tensorflow_models.save(path, dict.fromkeys(signatures, function))

    with pytest.raises(LoadError, match=message):
        workshop.load(
            leaky_config("tensorflow"),
            config_json=json.dumps({"name": "leaky", "parameters": parameters(TF_SIGNATURE_DEF=wanted)}),
        )


def test_another_signature_and_tag_are_chosen_by_parameters(workshop: Workshop, library: Any) -> None:
    path = workshop.version_dir("two") / "model.savedmodel"
    tensor = {"x": (library.float32, [None, 1])}
    tensorflow_models.save(path, {"plus": (plus(1), tensor), "minus": (plus(-1), tensor)})
    config = plain_config("two", "tensorflow", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    def engine(**given: str) -> Engine:
        return workshop.load(config, config_json=json.dumps({"parameters": parameters(**given)}))

    told = {"TF_GRAPH_TAG": "serve", "TF_NUM_INTRA_THREADS": "1", "TF_USE_PER_SESSION_THREADS": "On"}
    (result,) = results(engine(TF_SIGNATURE_DEF="minus", **told), [Row({"x": wire("x", [[3]])})], want_state=False)

    assert [[2]] == array(result, "y").tolist()
    with pytest.raises(LoadError, match="MetaGraphDef associated with tags 'gpu' could not be found"):
        engine(TF_GRAPH_TAG="gpu")
    with pytest.raises(LoadError, match="TF_NUM_INTER_THREADS must be a non-negative number, not 'all'"):
        engine(TF_NUM_INTER_THREADS="all")


def test_a_datatype_that_no_request_can_carry_is_refused(workshop: Workshop) -> None:
    tensorflow_models.identity(workshop.version_dir("leaky") / "model.savedmodel", "complex64", [None, 1])

    with pytest.raises(LoadError, match="unable to process 'x' for 'leaky', unsupported datatype 'complex64'"):
        workshop.load(leaky_config("tensorflow"), config_json='{"name": "leaky"}')


def test_a_model_that_writes_to_its_variables_serves_no_sequences(workshop: Workshop) -> None:
    """Alone it is served, as in Triton: a request counts for the next."""
    tensorflow_models.keeps_its_sum(workshop.version_dir("sum") / "model.savedmodel")
    told: dict[str, Any] = {"inputs": [fp32("x", 1)], "outputs": [fp32("y", 1)]}

    engine = workshop.load(plain_config("sum", "tensorflow", **told))
    row = Row({"x": wire("x", [[2]])})
    assert [4, 6] == [array(results(engine, [row], want_state=False)[0], "y").item() for _ in range(2)]
    with pytest.raises(
        LoadError, match=r"it writes to its own variables \(AssignAddVariableOp '.*'\), which all of its"
    ):
        workshop.load(sequence_config("sum", "tensorflow", **told))


def test_a_file_that_lacks_the_values_of_its_variables_is_refused_with_the_remedy(workshop: Workshop) -> None:
    tensorflow_models.saved_layer(workshop.version_dir("layer") / "model.savedmodel")
    config = plain_config("layer", "tensorflow", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    with pytest.raises(LoadError, match=r"its variable '.*' has no value in the file.*write it with the method export"):
        workshop.load(config)


def test_fixed_shape_is_refused(workshop: Workshop) -> None:
    with pytest.raises(LoadError, match="the backend tensorflow has no fixed_shape"):
        workshop.load(leaky_config("tensorflow", parameters={"fixed_shape": "true"}))


def test_a_gpu_is_refused_with_the_remedy(workshop: Workshop) -> None:
    workshop.device = "cuda:0"
    with pytest.raises(LoadError, match="tensorflow backend supports only CPU device; give it an instance_group"):
        leaky(workshop)


# -- frozen graphs ----------------------------------------------------------------------------------------------------

GRAPH = {
    "name": "graph",
    "platform": "tensorflow_graphdef",
    "input": [{"name": "x"}],
    "output": [{"name": "y"}],
    "sequence_batching": {"state": [{"input_name": "s", "output_name": "s_next"}]},
}


def graph_config(**changed: Any) -> ModelConfig:
    given: dict[str, Any] = {"inputs": [fp32("x", 3)], "outputs": [fp32("y", 3)], "states": [STATE], **changed}
    return sequence_config("graph", "tensorflow", **given)


@pytest.fixture
def graph_folder(workshop: Workshop) -> Path:
    folder = workshop.version_dir("graph")
    tensorflow_models.graph(folder / "model.graphdef")
    return folder


def load_graph(workshop: Workshop, config: ModelConfig | None = None, **told: Any) -> Engine:
    return workshop.load(config or graph_config(), config_json=json.dumps({**GRAPH, **told}))


@pytest.mark.parametrize("beside", ["version", "model"])
def test_a_graph_is_served_by_the_names_of_its_nodes(workshop: Workshop, graph_folder: Path, beside: str) -> None:
    place = graph_folder if beside == "version" else graph_folder.parent
    (place / "init_ops.json").write_text('{"init_ops": ["init"]}')
    engine = load_graph(workshop, parameters=parameters(TF_INIT_OPS_FILE="init_ops.json"))

    def step(*, start: bool) -> list[Any]:
        row = Row({"x": wire("x", [[1, 2, 3]])}, slot=2, start=start)
        return array(results(engine, [row])[0], "y").tolist()

    assert [[[2, 3, 4]], [[2.5, 4, 5.5]]] == [step(start=True), step(start=False)]


@pytest.mark.parametrize(
    ("config", "told", "message"),
    [
        (graph_config(inputs=[fp32("z", 3)]), {"input": [{"name": "z"}]}, "expects 2 inputs"),
        (graph_config(outputs=[fp32("z", 3)]), {}, "unexpected inference output 'z'"),
        (graph_config(), {"parameters": parameters(TF_INIT_OPS_FILE="none.json")}, "there is no file 'none.json'"),
    ],
)
def test_what_a_graph_does_not_have_is_told(
    workshop: Workshop, graph_folder: Path, config: ModelConfig, told: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load_graph(workshop, config, **told)


def test_what_is_no_graph_is_refused(workshop: Workshop) -> None:
    path = workshop.version_dir("graph") / "model.graphdef"
    path.write_bytes(b"no graph")
    with pytest.raises(LoadError, match=r"failed to load model '.*': TensorFlow error: "):
        load_graph(workshop)
    path.write_bytes(b"")
    with pytest.raises(LoadError, match="model graph has an empty network"):
        load_graph(workshop)


def test_a_graph_without_its_initial_operations_fails_its_requests(workshop: Workshop, graph_folder: Path) -> None:
    failed = error(load_graph(workshop), Row({"x": wire("x", [[1, 2, 3]])}, slot=0, start=True))

    assert failed.message.startswith("TensorFlow error: ")


def test_the_compiler_of_torch_is_loaded_before_tensorflow(tmp_path: Path) -> None:
    """The other way round the process dies. Builds of torch for CPUs have no such compiler, so one is made up here."""
    (tmp_path / "triton.py").write_text("import sys\nprint('tensorflow' in sys.modules)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])

    told = subprocess.run(
        [sys.executable, "-c", "import executor.engine.tensorflow.session"],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert told.stdout == "False\n"
