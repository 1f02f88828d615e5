"""Warm-up: an instance has run its samples before it is ready, or is not loaded."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from executor.engine.base import RowResult
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel
from executor.models.warmup import warmup_row
from executor.workers.devices import Devices
from shared.contract.errors import LoadError
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    ModelConfig,
    SequenceBatching,
    TensorSpec,
    WarmupInput,
    WarmupSample,
    WarmupSource,
)
from shared.contract.tensors import Tensor, pack_bytes, to_numpy

MODEL = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.calls = []
            self.path = args["model_repository"] + "/" + args["model_instance_name"] + ".json"

        def execute(self, requests):
            rows, responses = [], []
            for request in requests:
                given = {tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()}
                rows.append(given)
                if given["X"][0][0] == 13:
                    raise RuntimeError("unlucky")
                total = pb_utils.get_input_tensor_by_name(request, "SUM").as_numpy() + 5
                outputs = [pb_utils.Tensor("Y", total), pb_utils.Tensor("SUM_NEXT", total)]
                responses.append(pb_utils.InferenceResponse(outputs))
            self.calls.append(rows)
            with open(self.path, "w") as file:
                json.dump(self.calls, file)
            return responses
"""

CONFIG = """
    backend: "python"
    max_batch_size: 4
    input { name: "X" data_type: TYPE_INT32 dims: 1 }
    output { name: "Y" data_type: TYPE_INT32 dims: 1 }
    instance_group { name: "one" kind: KIND_CPU count: 2 }
    sequence_batching {
        oldest { max_candidate_sequences: 2 }
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
        control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
        state { input_name: "SUM" output_name: "SUM_NEXT" data_type: TYPE_INT32 dims: 1 }
    }
"""


def load(directory: Path, *samples: str) -> LoadedModel:
    """Loads the model above with those samples."""
    version = directory / "warm" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(textwrap.dedent(MODEL))
    (directory / "warm" / "config.pbtxt").write_text(CONFIG + "".join(f"model_warmup {{ {one} }}" for one in samples))
    (directory / "warm" / "warmup").mkdir()
    (directory / "warm" / "warmup" / "seven").write_bytes(np.array([7, 8], "<i4").tobytes())
    (directory / "warm" / "warmup" / "thirteen").write_bytes(np.array([13], "<i4").tobytes())
    return ModelRepository([directory], Devices()).load("warm")


def sample(name: str, *inputs: str, batch_size: int = 1, count: int = 0) -> str:
    return f'name: "{name}" batch_size: {batch_size} count: {count} ' + " ".join(
        f"inputs {{ {one} }}" for one in inputs
    )


X_SEVEN = 'key: "X" value { data_type: TYPE_INT32 dims: 1 input_data_file: "seven" }'
X_THIRTEEN = 'key: "X" value { data_type: TYPE_INT32 dims: 1 input_data_file: "thirteen" }'
START_ZERO = 'key: "START" value { data_type: TYPE_INT32 dims: 1 zero_data: true }'


async def test_every_instance_runs_every_sample_before_it_is_loaded_and_keeps_no_state(tmp_path: Path) -> None:
    model = load(tmp_path, sample("seven", X_SEVEN, START_ZERO, batch_size=3, count=2))

    (served,) = model.versions
    row = {"X": [[7]], "START": [[0]], "END": [[1]], "SUM": [[0]]}
    for worker in served.workers:
        path = tmp_path / "warm" / f"{worker.name}.json"
        assert [[row] * 3] * 2 == json.loads(path.read_text())
        step = warmup_row(served.config, served.config.warmup[0], tmp_path / "warm")
        # A sequence's own first step finds the initial state in any slot, and so does a step that goes on there.
        for slot in (0, 1):
            ran = await worker.run([type(step)(step.inputs, step.controls, slot=slot)], [False])
            (result,) = ran.rows
            assert isinstance(result, RowResult), result
            assert 5 == to_numpy(result.outputs[0]).item()
        await worker.close()


def test_a_sample_that_fails_fails_the_load_in_triton_s_words(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(tmp_path, sample("good", X_SEVEN), sample("bad", X_THIRTEEN, batch_size=2))

    message = caught.value.message
    assert "is at UNAVAILABLE state: Invalid argument: failed to run warmup sample 'bad': " in message
    assert 2 == message.count("RuntimeError: unlucky")


def plain(*inputs: TensorSpec, max_batch_size: int = 4, controls: tuple[ControlSpec, ...] = ()) -> ModelConfig:
    batching = SequenceBatching(Direct(), 1, controls) if controls else None
    return ModelConfig("m", "python", "", max_batch_size, inputs, (), sequence_batching=batching)


def tensor_x(datatype: str, source: WarmupSource, file: str = "", *, dims: tuple[int, ...] = (2, 3)) -> Tensor:
    """Tensor X of a sample."""
    config = plain(TensorSpec("X", datatype, dims))
    return warmup_row(config, made(WarmupInput(datatype, dims, source, file)), Path(__file__).parent).inputs["X"]


def made(tensor: WarmupInput, name: str = "X") -> WarmupSample:
    return WarmupSample("s", 1, {name: tensor})


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP32", "FP64"])
def test_zeros_and_random_numbers_have_the_batch_dimension_and_the_datatype(datatype: str) -> None:
    zeros, random = tensor_x(datatype, WarmupSource.ZERO), tensor_x(datatype, WarmupSource.RANDOM)

    assert not to_numpy(zeros).any()
    assert ((1, 2, 3), (1, 2, 3)) == (to_numpy(zeros).shape, to_numpy(random).shape)
    assert to_numpy(random).any()
    assert np.isfinite(to_numpy(random)).all()


def test_random_bf16_numbers_are_below_one() -> None:
    bits = to_numpy(tensor_x("BF16", WarmupSource.RANDOM)).astype(np.uint32) << 16

    assert ((bits.view(np.float32) >= 0) & (bits.view(np.float32) < 1)).all()


def test_random_strings_are_empty() -> None:
    for source in (WarmupSource.ZERO, WarmupSource.RANDOM):
        assert pack_bytes([b""] * 6) == tensor_x("BYTES", source).raw


def test_a_file_of_strings_is_taken_whole(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "texts").write_bytes(pack_bytes([b"a", b"bcd"]))
    config = plain(TensorSpec("X", "BYTES", (2,)))

    row = warmup_row(config, made(WarmupInput("BYTES", (2,), WarmupSource.FILE, "texts")), tmp_path)

    assert pack_bytes([b"a", b"bcd"]) == row.inputs["X"].raw


def test_controls_that_a_sample_leaves_out_are_those_of_one_step() -> None:
    kinds = {"S": ControlKind.START, "E": ControlKind.END, "R": ControlKind.READY}
    flags = tuple(ControlSpec(name, kind, "INT32", (0, 1)) for name, kind in kinds.items())
    for corrid, nobody in (("UINT64", bytes(8)), ("BYTES", bytes(4))):
        controls = (*flags, ControlSpec("C", ControlKind.CORRID, corrid))
        config = plain(TensorSpec("X", "INT32", (1,)), controls=controls)

        row = warmup_row(config, made(WarmupInput("INT32", (1,), WarmupSource.ZERO)), Path())

        one = np.int32(1).tobytes()
        assert {"S": one, "E": one, "R": one, "C": nobody} == {name: t.raw for name, t in row.controls.items()}
        assert (True, None) == (row.start, row.slot)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        (
            "Z",
            WarmupInput("INT32", (1,), WarmupSource.ZERO),
            "failed to run warmup sample 's': unexpected inference input 'Z' for model 'm'; ",
        ),
        (
            "S",
            WarmupInput("FP32", (1,), WarmupSource.ZERO),
            "failed to run warmup sample 's': inference input 'S' data-type is 'FP32', but model 'm' expects 'INT32'; ",
        ),
        (
            "S",
            WarmupInput("INT32", (2,), WarmupSource.ZERO),
            "failed to run warmup sample 's': control tensor 'S' of model 'm' has one element, not (2,); ",
        ),
        (
            "X",
            WarmupInput("INT32", (1,), WarmupSource.FILE, "absent"),
            "failed to run warmup sample 's': cannot read warmup/absent: No such file or directory; ",
        ),
    ],
)
def test_a_sample_that_does_not_fit_the_model_is_refused(name: str, tensor: WarmupInput, text: str) -> None:
    controls = (ControlSpec("S", ControlKind.START, "INT32", (0, 1)),)
    config = plain(TensorSpec("X", "INT32", (1,)), controls=controls)

    with pytest.raises(LoadError) as caught:
        warmup_row(config, made(tensor, name), Path())

    assert text == caught.value.message
