"""What a configuration says of batches, warm-up, metrics and the cache, as values; and that values travel unharmed."""

from __future__ import annotations

import pytest

from executor.configuration.rules.batch_io import batch_inputs, batch_outputs
from shared.configuration.parse import parse_text
from shared.contract.model_config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    StateSpec,
    WarmupInput,
    WarmupSample,
    WarmupSource,
)
from tests.executor.configuration.conftest import IO, LoadText


@pytest.mark.parametrize("kind", BatchInputKind)
def test_every_kind_of_batch_input_is_a_value(kind: BatchInputKind) -> None:
    config = parse_text(
        f'batch_input {{ kind: {kind} target_name: ["a", "b"] data_type: TYPE_FP32 source_input: "X" }}', "text"
    )

    assert (BatchInput(kind, ("a", "b"), "FP32", "X"),) == batch_inputs(config)


def test_batch_output_is_a_value() -> None:
    config = parse_text('batch_output { target_name: ["Y", "Z"] source_input: "X" }', "text")

    assert (BatchOutput(("Y", "Z"), "X"),) == batch_outputs(config)


def test_warmup_samples_are_values(load_text: LoadText) -> None:
    """A sample of batch size 0 is skipped, a count of 0 is 1, and dims are those of one row."""
    (load_text(IO).model_dir / "warmup").mkdir()
    (load_text(IO).model_dir / "warmup" / "x").write_bytes(b"")
    loaded = load_text(
        f"""{IO}
        model_warmup {{ name: "none" inputs {{ key: "X" value {{ }} }} }}
        model_warmup {{ name: "one" batch_size: 3 inputs [
          {{ key: "X" value {{ data_type: TYPE_FP32 dims: 4 random_data: true }} }},
          {{ key: "S" value {{ data_type: TYPE_STRING dims: [2, 1] input_data_file: "x" }} }} ] }}
        model_warmup {{ name: "two" batch_size: 1 count: 5
          inputs {{ key: "X" value {{ data_type: TYPE_FP32 dims: 4 zero_data: true }} }} }}"""
    )

    assert (
        WarmupSample(
            "one",
            3,
            {
                "S": WarmupInput("BYTES", (2, 1), WarmupSource.FILE, "x"),
                "X": WarmupInput("FP32", (4,), WarmupSource.RANDOM),
            },
        ),
        WarmupSample("two", 1, {"X": WarmupInput("FP32", (4,), WarmupSource.ZERO)}, count=5),
    ) == loaded.config.warmup
    assert "skipping batch 0 warmup sample 'none'" in loaded.config.notes


def test_warmup_of_a_sequence_model_without_its_controls_is_noted(load_text: LoadText) -> None:
    control = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }'

    notes = load_text(
        f"""{IO} sequence_batching {{ {control} }} model_warmup {{ name: "w" batch_size: 1
        inputs {{ key: "X" value {{ data_type: TYPE_FP32 dims: 4 zero_data: true }} }} }}"""
    ).config.notes

    assert "warmup sample 'w' has no tensor 'START', which every request of the model has" in notes


def test_metrics_and_cache_are_values(load_text: LoadText) -> None:
    config = load_text(
        f"""{IO} response_cache {{ enable: true }} metric_tags [ {{ key: "b" value: "2" }}, {{ key: "a" value: "1" }} ]
        model_metrics {{ metric_control {{ metric_identifier {{ family: "nv_inference_first_response_histogram_ms" }}
          histogram_options {{ buckets: [1, 2.5] }} }} }}"""
    ).config

    assert (True, {"a": "1", "b": "2"}) == (config.response_cache, config.metric_tags)
    assert {"nv_inference_first_response_histogram_ms": (1.0, 2.5)} == config.histogram_buckets


def test_states_stay_paired_however_their_names_sort(load_text: LoadText) -> None:
    """A server that pairs sorted inputs with sorted outputs swaps these two."""
    state = 'state {{ input_name: "{}" output_name: "{}" data_type: TYPE_FP32 dims: {} }}'
    states = f"{state.format('a_in', 'z_out', 1)} {state.format('b_in', 'y_out', 2)}"

    batching = load_text(f"{IO} sequence_batching {{ {states} }}").config.sequence_batching

    assert batching is not None
    assert (StateSpec("a_in", "z_out", "FP32", (1,)), StateSpec("b_in", "y_out", "FP32", (2,))) == batching.states
