"""The sample models, the benchmark's and the seeds': the files themselves, run without a server.

What a server makes of them is tested where the server is; here it is that the files agree with their configurations
and do what deploy/models/README.md promises.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from numpy.typing import NDArray
from torch import Tensor
from tritonclient.grpc import model_config_pb2

from executor.configuration.load import AutoComplete, LoadedConfig, load_model_config
from executor.engine.base import LoadRequest, Row, RowError, RowResult
from executor.engine.python.backend import PythonBackend
from executor.engine.pytorch.signature import read_signature, script_deprecation_ignored
from executor.engine.runtimes import PYTORCH
from shared.contract.tensors import from_numpy, to_numpy

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "deploy" / "models"
BENCHMARKS = ROOT / "benchmarks"
TRAINING = ROOT / "examples" / "text_lstm"
SEEDS = ROOT / "tests" / "fixtures" / "seed_models"
HIDDEN = 192
CANONICAL = [
    *sorted(SAMPLES.glob("*/config.pbtxt")),
    *sorted((BENCHMARKS / "models").glob("*/config.pbtxt")),
    SEEDS / "add_model" / "config.pbtxt",
    SEEDS / "mymodel" / "config.pbtxt",
]

# The generated module has no types.
ModelConfigMessage: Any = cast("Any", model_config_pb2).ModelConfig

State = tuple[Tensor, Tensor]
Answer = dict[str, Tensor]


def imported(path: Path, name: str) -> ModuleType:
    """A Python file as a module, by its path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(path: Path) -> Any:
    """A TorchScript file, ready to be called."""
    with script_deprecation_ignored():
        # torch leaves what it returns without a type.
        return cast("Any", torch.jit).load(str(path))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """The models are small; more threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


# Configurations


@pytest.mark.parametrize("path", CANONICAL, ids=lambda path: path.parent.name)
def test_configuration_is_one_that_triton_parses(path: Path) -> None:
    config = ModelConfigMessage()
    text_format.Parse(path.read_text(), config)

    assert path.parent.name == config.name
    assert config.backend in ("pytorch", "python")


def configured(model_dir: Path) -> LoadedConfig:
    """A model's configuration as an executor reads it."""
    completions: dict[str, AutoComplete] = {
        "pytorch": PYTORCH.auto_complete,
        "python": PythonBackend().auto_complete,
    }
    return load_model_config(model_dir, backends=completions)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SAMPLES.glob("*/config.pbtxt")))
def test_sample_configurations_load_without_remarks(name: str) -> None:
    found = configured(SAMPLES / name)

    assert found.versions == (1,)
    assert found.config.notes == ()
    assert found.config.state_in_mesh == (name not in ("add_sub", "row_norms"))


def test_every_sample_model_is_complete_and_described() -> None:
    described = re.findall(r"^## (\w+)$", (SAMPLES / "README.md").read_text(), re.MULTILINE)
    folders = sorted(path.parent.name for path in SAMPLES.glob("*/config.pbtxt"))

    assert folders == sorted(described)
    assert all(list((SAMPLES / folder / "1").glob("model.p*")) for folder in folders)


# text_lstm


@pytest.fixture(scope="module")
def text_lstm() -> Any:
    return loaded(SAMPLES / "text_lstm" / "1" / "model.pt")


def blank(batch: int = 1) -> State:
    """The state of a text that has not begun."""
    return torch.zeros(batch, HIDDEN), torch.zeros(batch, HIDDEN)


def characters(*texts: str) -> Tensor:
    """Texts of one length, [texts, characters] uint8."""
    return torch.tensor([list(text.encode()) for text in texts], dtype=torch.uint8).reshape(len(texts), -1)


def state_of(answer: Answer) -> State:
    """What the next step is given."""
    return answer["HIDDEN_OUT"], answer["CELL_OUT"]


def read(model: Any, *pieces: str) -> Answer:
    """The answer to the last of several pieces of one text."""
    state, answer = blank(), {}
    for piece in pieces:
        answer: Answer = model(characters(piece), *state)
        state = state_of(answer)
    return answer


def continuation(answer: Answer) -> bytes:
    """How a single text goes on, in the model's opinion."""
    return answer["CONTINUATION"].numpy().tobytes()


def assert_same(expected: Answer, actual: Answer) -> None:
    """All outputs and states are equal, to the last bit."""
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_text_model_returns_what_its_configuration_declares(text_lstm: Any) -> None:
    answer = text_lstm(characters("Hello", "World"), *blank(2))

    assert {
        "NEXT": ((2, 1), torch.uint8),
        "PROBABILITIES": ((2, 128), torch.float32),
        "CONTINUATION": ((2, 24), torch.uint8),
        "HIDDEN_OUT": ((2, HIDDEN), torch.float32),
        "CELL_OUT": ((2, HIDDEN), torch.float32),
    } == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in answer.items()}


def test_a_text_in_pieces_is_answered_like_the_whole(text_lstm: Any) -> None:
    whole = read(text_lstm, "Alice was beginning to get very tired")
    pieces = read(text_lstm, "Alice was", "", " beginning to ", "get very", " tired")

    assert torch.equal(whole["CONTINUATION"], pieces["CONTINUATION"])
    # States are rounded to FP32 between pieces, hence not to the last bit.
    torch.testing.assert_close(pieces["PROBABILITIES"], whole["PROBABILITIES"], atol=1e-5, rtol=1e-4)


def test_a_text_is_answered_alike_alone_and_in_any_company(text_lstm: Any) -> None:
    texts = ["Alice was", "the Queen", "Off with ", "said the ", "I should ", "why, it's", "Mock Turt", "very much"]
    alone: list[Answer] = [text_lstm(characters(text), *blank()) for text in texts]
    for size in (2, 5, len(texts)):
        together: Answer = text_lstm(characters(*texts[:size]), *blank(size))
        for row, expected in enumerate(alone[:size]):
            assert_same(expected, {name: tensor[row : row + 1] for name, tensor in together.items()})


def test_the_next_character_is_the_likeliest_and_begins_the_continuation(text_lstm: Any) -> None:
    answer = read(text_lstm, "The Mock Turtle si")

    assert answer["PROBABILITIES"].argmax(1).item() == answer["NEXT"].item()
    assert answer["CONTINUATION"][0, 0].item() == answer["NEXT"].item()
    assert answer["PROBABILITIES"].sum().item() == pytest.approx(1.0)


def test_the_continuation_is_what_reading_the_predictions_gives(text_lstm: Any) -> None:
    answer = read(text_lstm, "The Queen ")
    promised = continuation(answer)
    given = bytearray()
    while len(given) < len(promised):
        given.append(int(answer["NEXT"].item()))
        answer = text_lstm(answer["NEXT"], *state_of(answer))

    assert promised == bytes(given)


def test_an_empty_piece_predicts_and_changes_nothing(text_lstm: Any) -> None:
    before = read(text_lstm, "Alice")
    assert_same(before, text_lstm(characters(""), *state_of(before)))


def test_bytes_that_the_model_never_saw_are_read_and_never_predicted(text_lstm: Any) -> None:
    answer = read(text_lstm, "Füße \x00 €")

    assert answer["PROBABILITIES"].isfinite().all()
    assert continuation(answer).decode("ascii").isprintable()


def test_predictions_read_like_english(text_lstm: Any) -> None:
    book = set(re.findall(r"[a-z]+", (TRAINING / "corpus" / "alice29.txt").read_text().lower()))
    prompts = (
        "Alice was beginning to ",
        "The King and the Queen ",
        "It was a good day ",
        "How do you ",
        "I think that ",
    )
    continuations = [continuation(read(text_lstm, prompt)).decode().lower() for prompt in prompts]
    # The last word may be a piece of one.
    words = [word for text in continuations for word in re.findall(r"[a-z]+", text)[:-1]]

    assert len(words) >= 10
    assert [word for word in words if word not in book] == []


def test_next_characters_of_the_book_are_mostly_predicted(text_lstm: Any) -> None:
    book = re.sub(r"\s+", " ", (TRAINING / "corpus" / "alice29.txt").read_text())
    # The held-out end of the book.
    text = book[-3000:-2799]
    codes, state, right = characters(text), blank(), 0
    for position in range(200):
        answer = text_lstm(codes[:, position : position + 1], *state)
        state = state_of(answer)
        right += answer["NEXT"].item() == codes[0, position + 1].item()

    assert right > 200 * 0.5


def test_the_model_is_small_and_its_text_is_the_one_the_notice_describes() -> None:
    notice = (TRAINING / "corpus" / "NOTICE").read_text()

    assert (SAMPLES / "text_lstm" / "1" / "model.pt").stat().st_size < 1 << 20
    assert hashlib.sha256((TRAINING / "corpus" / "alice29.txt").read_bytes()).hexdigest() in notice


def test_what_is_exported_is_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINING))
    training = imported(TRAINING / "train_text_lstm.py", "train_text_lstm")
    vocabulary = b" abcdef"
    with torch.inference_mode(mode=False):
        trained = training.CharacterModel(len(vocabulary) + 1, 5, 8, 0.5).eval()
        serving = training.export(trained, vocabulary).eval()
        scores, (hidden, cell) = trained(training.encode(b"fade a bed", vocabulary)[None], None)
        answer = serving(characters("fade a bed"), torch.zeros(1, 8), torch.zeros(1, 8))
    probabilities = scores[0, -1, 1:].softmax(0)

    torch.testing.assert_close(answer["PROBABILITIES"][0, list(vocabulary)], probabilities, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(answer["HIDDEN_OUT"], hidden[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(answer["CELL_OUT"], cell[0], atol=1e-6, rtol=1e-4)


def test_the_text_model_serves_interleaved_texts_through_the_engine(text_lstm: Any) -> None:
    found = configured(SAMPLES / "text_lstm")
    request = LoadRequest(found.config, found.json, found.model_dir, "1", "text_lstm_0", "cpu", slots=4)
    engine = PYTORCH.load(request)
    texts = {3: ("Alice was ", "beginning "), 1: ("The Queen ", "said to ")}
    steps = [
        [
            Row({"TEXT": from_numpy("TEXT", characters(pieces[step]).numpy())}, slot=slot, start=step == 0)
            for slot, pieces in texts.items()
        ]
        for step in range(2)
    ]
    results = [engine.run(rows, [True, True]).rows for rows in steps]
    engine.close()

    for result, pieces in zip(results[-1], texts.values(), strict=True):
        assert isinstance(result, RowResult)
        outputs = {tensor.name: tensor for tensor in result.outputs}
        expected = read(text_lstm, *pieces)
        assert bytes(outputs["CONTINUATION"].raw) == continuation(expected)
        assert bytes(outputs["PROBABILITIES"].raw) == expected["PROBABILITIES"].numpy().tobytes()
        assert bytes(result.states["HIDDEN_IN"].raw) == expected["HIDDEN_OUT"].numpy().tobytes()


# Python models, through as much of Triton's API as they use: they must also run where no state is handed to them


@dataclass(frozen=True)
class ApiTensor:
    """pb_utils.Tensor."""

    name: str
    content: NDArray[Any]

    def as_numpy(self) -> NDArray[Any]:
        return self.content


@dataclass(frozen=True)
class ApiRequest:
    """pb_utils.InferenceRequest."""

    inputs: dict[str, ApiTensor]
    sequence: int | str = 0

    def correlation_id(self) -> int | str:
        return self.sequence


class ApiError(Exception):
    """pb_utils.TritonError."""

    INVALID_ARG = 3

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ApiResponse:
    """pb_utils.InferenceResponse."""

    output_tensors: Sequence[ApiTensor] = ()
    error: ApiError | None = None

    def values(self) -> dict[str, Any]:
        return {tensor.name: tensor.content.tolist() for tensor in self.output_tensors}


def api_request(sequence: int | str = 0, **inputs: NDArray[Any]) -> ApiRequest:
    return ApiRequest({name: ApiTensor(name, array) for name, array in inputs.items()}, sequence)


def number(value: int, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    return np.array([[value]], dtype=dtype)


def input_tensor(request: ApiRequest, name: str) -> ApiTensor | None:
    """pb_utils.get_input_tensor_by_name."""
    return request.inputs.get(name)


def python_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of a model.py, initialised."""
    api: Any = ModuleType("triton_python_backend_utils")
    api.Tensor, api.InferenceResponse, api.TritonError = ApiTensor, ApiResponse, ApiError
    api.get_input_tensor_by_name = input_tensor
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", api)
    model = imported(path, f"model_{path.parent.parent.name}").TritonPythonModel()
    if hasattr(model, "initialize"):
        with script_deprecation_ignored():
            model.initialize({})
    return model


def test_the_sum_is_kept_per_sequence_by_the_engine() -> None:
    found = configured(SAMPLES / "running_sum")
    request = LoadRequest(found.config, found.json, found.model_dir, "1", "running_sum_0", "cpu", slots=4)
    engine = PythonBackend().load(request)

    def row(slot: int, value: int, *, start: bool) -> Row:
        controls = {
            name: from_numpy(name, number(flag)) for name, flag in (("START", start), ("END", False), ("READY", True))
        }
        return Row({"INPUT": from_numpy("INPUT", number(value))}, controls, slot, start=start)

    engine.run([row(2, 5, start=True), row(0, 2**31 - 1, start=True)], [True, True])
    grown, full = engine.run([row(2, 6, start=False), row(0, 1, start=False)], [True, True]).rows
    engine.close()

    assert isinstance(grown, RowResult)
    assert isinstance(full, RowError)
    assert to_numpy(grown.outputs[0]).tolist() == [[11]]
    assert to_numpy(grown.states["SUM_IN"]).tolist() == [11]
    assert "does not fit INT32" in full.message


@pytest.fixture
def running_sum(monkeypatch: pytest.MonkeyPatch) -> Any:
    return python_model(SAMPLES / "running_sum" / "1" / "model.py", monkeypatch)


def sum_step(value: int, before: int, *, start: bool = False, ready: bool = True) -> ApiRequest:
    return api_request(
        INPUT=number(value), SUM_IN=number(before, np.int64), START=number(start), END=number(0), READY=number(ready)
    )


def test_the_sum_goes_on_from_the_state_it_is_given(running_sum: Any) -> None:
    start, later, other = running_sum.execute([sum_step(5, 99, start=True), sum_step(-3, 40), sum_step(1, 2**31 - 2)])

    assert start.values() == {"OUTPUT": [[5]], "SUM_OUT": [[5]]}
    assert later.values() == {"OUTPUT": [[37]], "SUM_OUT": [[37]]}
    assert other.values() == {"OUTPUT": [[2**31 - 1]], "SUM_OUT": [[2**31 - 1]]}
    assert [tensor.content.dtype for tensor in later.output_tensors] == [np.int32, np.int64]


def test_a_row_that_is_not_ready_counts_for_nothing(running_sum: Any) -> None:
    (padding,) = running_sum.execute([sum_step(2**31 - 1, 2**40, ready=False)])

    assert padding.error is None
    assert padding.values() == {"OUTPUT": [[0]], "SUM_OUT": [[0]]}


def test_a_sum_beyond_int32_is_that_rows_error_alone(running_sum: Any) -> None:
    beyond, fine = running_sum.execute([sum_step(1, 2**31 - 1), sum_step(1, 1)])

    assert str(beyond.error) == "the sum 2147483648 does not fit INT32; the sequence's sum stays 2147483647"
    assert beyond.output_tensors == ()
    assert fine.values()["OUTPUT"] == [[2]]


def test_add_sub_gives_each_request_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(SAMPLES / "add_sub" / "1" / "model.py", monkeypatch)
    generator = np.random.default_rng(0)
    pairs = [generator.random((2, rows, 16), dtype=np.float32) for rows in (1, 3, 2)]
    responses = model.execute([api_request(INPUT0=first, INPUT1=second) for first, second in pairs])

    for (first, second), response in zip(pairs, responses, strict=True):
        total, difference = response.output_tensors
        assert (total.name, difference.name) == ("OUTPUT0", "OUTPUT1")
        np.testing.assert_array_equal(total.content, first + second)
        np.testing.assert_array_equal(difference.content, first - second)


def test_row_norms_pads_and_gives_each_request_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(SAMPLES / "row_norms" / "1" / "model.py", monkeypatch)
    generator = np.random.default_rng(0)
    vectors = [generator.random(shape, dtype=np.float32) for shape in ((1, 5), (3, 2), (2, 9))]
    responses = model.execute([api_request(VECTOR=vector) for vector in vectors])

    for vector, response in zip(vectors, responses, strict=True):
        (norm,) = response.output_tensors
        np.testing.assert_allclose(norm.content, np.linalg.norm(vector, axis=1, keepdims=True), rtol=1e-6)


@dataclass(frozen=True)
class Shaped:
    """A waiting request, of which only the shape matters."""

    vector: tuple[int, int]

    def shape(self, name: str) -> tuple[int, int]:
        assert name == "VECTOR"
        return self.vector


@pytest.mark.parametrize(
    ("bound", "shapes", "fit"),
    [
        (12, [(1, 4), (1, 2), (1, 3), (1, 1)], 3),
        (12, [(1, 2), (1, 6), (1, 1)], 2),
        (100, [(3, 5), (2, 9)], 2),
        (4, [(1, 9)], 0),
    ],
)
def test_the_strategy_of_row_norms_counts_the_padding(
    bound: int, shapes: list[tuple[int, int]], fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "row_norms_strategy", ModuleType("row_norms_strategy"))
    strategy: Any = imported(SAMPLES / "row_norms" / "batchstrategy.py", "row_norms_strategy")
    batcher = strategy.model_batcher_initialize(SimpleNamespace(parameters={"MAX_VOLUME": str(bound)}))
    batch = strategy.model_batch_initialize(batcher)
    included = [strategy.model_batch_include_request(Shaped(shape), batch) for shape in shapes]

    assert [*included, False].index(False) == fit


@pytest.mark.parametrize("handed", [True, False], ids=["state from the server", "state of its own"])
def test_the_benchmark_sum_is_right_with_and_without_implicit_state(
    handed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = python_model(BENCHMARKS / "models" / "accumulate" / "1" / "model.py", monkeypatch)
    sums = {7: number(0), "seven": number(0)}
    for step in range(3):
        requests = [
            api_request(
                sequence,
                INPUT=number(step + 1),
                START=number(step == 0),
                END=number(step == 2),
                **({"SUM_IN": sums[sequence]} if handed else {}),
            )
            for sequence in sums
        ]
        for sequence, response in zip(sums, model.execute(requests), strict=True):
            sums[sequence] = response.output_tensors[-1].content
            assert len(response.output_tensors) == (2 if handed else 1)

    assert {sequence: array.item() for sequence, array in sums.items()} == {7: 6, "seven": 6}
    assert model.kept == {}


# The benchmarks' and the seeds' models


@pytest.fixture(scope="module")
def benchmark_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    imported(BENCHMARKS / "build_models.py", "build_models").build(directory)
    return directory


@pytest.fixture(scope="module")
def seed_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeds")
    imported(SEEDS / "build.py", "seed_models_build").build(directory)
    return directory


def test_the_benchmark_lstm_keeps_rows_apart(benchmark_models: Path) -> None:
    model = loaded(benchmark_models / "lstm_512" / "1" / "model.pt")
    inputs, hidden, cell = torch.randn(3, 128), torch.randn(3, 2, 512), torch.randn(3, 2, 512)
    together = model(inputs, hidden, cell)
    alone = model(inputs[1:2], hidden[1:2], cell[1:2])

    assert {name: tuple(tensor.shape) for name, tensor in together.items()} == {
        "OUTPUT": (3, 10),
        "HIDDEN_OUT": (3, 2, 512),
        "CELL_OUT": (3, 2, 512),
    }
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, together[name][1:2])


@pytest.mark.parametrize("handed", [True, False], ids=["state from the server", "state of its own"])
def test_the_benchmark_lstm_in_python_equals_the_torch_one(
    handed: bool, benchmark_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = loaded(benchmark_models / "lstm_512" / "1" / "model.pt")
    model = python_model(benchmark_models / "lstm_512_python" / "1" / "model.py", monkeypatch)
    hidden = cell = torch.zeros(1, 2, 512)
    for step in range(3):
        piece = torch.randn(1, 128)
        expected = oracle(piece, hidden, cell)
        states = {"HIDDEN_IN": hidden.numpy(), "CELL_IN": cell.numpy()} if handed else {}
        controls = {"START": number(step == 0), "END": number(step == 2)}
        (response,) = model.execute([api_request(3, INPUT=piece.numpy(), **controls, **states)])
        hidden, cell = expected["HIDDEN_OUT"], expected["CELL_OUT"]
        results = {tensor.name: torch.from_numpy(tensor.content) for tensor in response.output_tensors}
        assert results.keys() == (expected.keys() if handed else {"OUTPUT"})
        for name, result in results.items():
            torch.testing.assert_close(result, expected[name])

    assert model.kept == {}


def test_the_seeds_sequence_model_sums_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(SEEDS / "mymodel" / "1" / "model.py", monkeypatch)
    matrix = np.array([[1, 2], [3, 4]], dtype=np.uint32)
    (response,) = model.execute([api_request(input0=matrix, total_in=matrix)])

    assert response.values() == {"output0": [[2, 4], [6, 8]], "total_out": [[2, 4], [6, 8]]}
    assert response.output_tensors[0].content.dtype == np.uint32


def test_the_seeds_models_take_and_give_what_the_documents_send(seed_models: Path) -> None:
    lstm, rnn, add = (
        loaded(seed_models / name / "1" / "model.pt") for name in ("my_lstm_model", "rnn_model", "add_model")
    )
    step = lstm(torch.randn(4, 128), torch.zeros(4, 2, 1024))
    reading = rnn(torch.arange(1, 11, dtype=torch.int32)[None], torch.zeros(1, 16))

    assert {name: tuple(value.shape) for name, value in step.items()} == {
        "OUTPUT__0": (4, 10),
        "lstm_state": (4, 2, 1024),
    }
    assert {name: tuple(value.shape) for name, value in reading.items()} == {"output": (1, 1), "hidden_state": (1, 16)}
    assert add(torch.tensor([5], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))["output"].tolist() == [8]


def test_the_seed_rnn_says_what_its_configuration_leaves_out(seed_models: Path) -> None:
    signature = read_signature(seed_models / "rnn_model" / "1" / "model.pt")

    assert signature is not None
    assert [tensor.name for tensor in signature.inputs] == ["sequence"]
    assert [tensor.name for tensor in signature.outputs] == ["output"]
    assert [state.input_name for state in signature.states] == ["hidden_state"]
