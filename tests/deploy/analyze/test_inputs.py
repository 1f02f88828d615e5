"""What the load sends: made from metadata, or read from perf_analyzer's files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from deploy.analyze.inputs import Input, made_sequences, read_sequences

NUMBER = Input("X", "INT32", (1, 2))
TEXT = Input("T", "BYTES", (1, 1))
OPEN = Input("S", "FP32", (1, -1))


def test_made_inputs_fit_the_model_and_are_always_the_same() -> None:
    sequences = made_sequences([NUMBER, TEXT, OPEN, Input("H", "BF16", (1, 1))], {"S": (3,)}, 5)

    assert {5} == {len(sequence) for sequence in sequences}
    number, text, opened, half = sequences[0][0]
    assert ((1, 2), 8) == (number.shape, len(number.raw))
    assert b"\x01\0\0\0a" == text.raw
    assert ((1, 3), 12) == (opened.shape, len(opened.raw))
    assert 2 == len(half.raw)
    assert sequences == made_sequences([NUMBER, TEXT, OPEN, Input("H", "BF16", (1, 1))], {"S": (3,)}, 5)
    with pytest.raises(click.UsageError, match="give --shape S:N"):
        made_sequences([OPEN], {}, 1)
    for size in (1 << 50, 1 << 70):
        with pytest.raises(click.UsageError, match="--shape: inputs of such a size cannot be made: "):
            made_sequences([OPEN], {"S": (size,)}, 1)
    with pytest.raises(click.UsageError, match="--shape N: the model has no such input; it has S"):
        made_sequences([OPEN], {"S": (3,), "N": (3,)}, 1)


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 1, 2)])
def test_sizes_that_the_model_would_refuse_are_told_before_the_search(sizes: tuple[int, ...]) -> None:
    assert (1, 2) == made_sequences([NUMBER], {"X": (2,)}, 1)[0][0][0].shape
    with pytest.raises(click.UsageError, match=r"--shape: input X has the shape \[1, 2\], which .* does not fit"):
        made_sequences([NUMBER], {"X": sizes}, 1)


def read(tmp_path: Path, data: Any, *inputs: Input) -> Any:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": data}))
    return read_sequences(path, inputs)


def test_perf_analyzers_forms_are_read(tmp_path: Path) -> None:
    encoded = base64.b64encode(np.array([7, 8], np.int32).tobytes()).decode()
    one, two = read(
        tmp_path, [[{"X": [1, 2]}, {"X": {"content": [3, 4], "shape": [2]}}], [{"X": {"b64": encoded}}]], NUMBER
    )

    assert [[1, 2], [3, 4]] == [np.frombuffer(step[0].raw, np.int32).tolist() for step in one]
    assert [7, 8] == np.frombuffer(two[0][0].raw, np.int32).tolist()
    assert {(1, 2)} == {step[0].shape for step in (*one, *two)}
    ((step,),) = read(tmp_path, [{"S": [0.5, 1.5, 2.5], "T": ["ab"]}], OPEN, TEXT)
    assert [("S", (1, 3)), ("T", (1, 1))] == [(tensor.name, tensor.shape) for tensor in step]


@pytest.mark.parametrize(
    "data",
    [
        [],
        [[]],
        [{"Y": [1]}],
        [{"X": [1]}],
        [{"X": [1.5, 2]}],
        [{"X": [2**31, 1]}],
        [{"X": [10**30, 1]}],
        [{"X": [float("inf"), 1]}],
        {"X": 1},
        [{"X": {"b64": "%"}}],
        [{"X": {"content": [1, 2, 3], "shape": [3]}}],
        [5],
        None,
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(click.UsageError, match="--input-data"):
        read(tmp_path, data, NUMBER)
