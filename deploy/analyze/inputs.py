"""What the load sends: made from a model's metadata, or read from a file in perf_analyzer's form (`--input-data`).

Source of the form: perf_analyzer's page "Input Data". {"data": [step, ...]} holds steps that stand for themselves,
{"data": [[step, ...], ...]} sequences. A step names each input's values: a list, {"content": [...], "shape": [...]} or
{"b64": "...", "shape": [...]}.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.contract.tensors import ELEMENT_BYTES, FLOATS, NUMPY_TYPE, Tensor, float_bytes, from_numpy

SEED = 7
STEPS_MADE = 16
"""Different steps that are made; sequences take them in turn."""


class Input(msgspec.Struct, frozen=True, array_like=True):
    """An input as the model's metadata describe it. shape: of one request, with a batch of one row; -1: any size"""

    name: str
    datatype: str
    shape: tuple[int, ...]


Step = tuple[Tensor, ...]


def made_sequences(inputs: Sequence[Input], shapes: Mapping[str, Sequence[int]], length: int) -> list[list[Step]]:
    """Sequences of random steps: numbers from 0 to 1, texts of one letter; always the same ones.

    shapes  of inputs whose metadata leave it open, without the batch
    raises  click.UsageError for an input whose shape is not known, or too large, and for a shape of what is no input
    """
    known = [one.name for one in inputs]
    for name in shapes:
        if name not in known:
            raise click.UsageError(f"--shape {name}: the model has no such input; it has {', '.join(known)}")
    chance = np.random.default_rng(SEED)
    try:
        steps = [tuple(made_tensor(one, shapes, chance) for one in inputs) for _ in range(STEPS_MADE)]
    except (MemoryError, ValueError) as error:
        raise click.UsageError(f"--shape: inputs of such a size cannot be made: {error}") from error
    return [[steps[(first + number) % STEPS_MADE] for number in range(length)] for first in range(STEPS_MADE)]


def made_tensor(one: Input, shapes: Mapping[str, Sequence[int]], chance: np.random.Generator) -> Tensor:
    """A tensor of the input's type and shape, drawn by chance. shapes: sizes of dimensions of -1, by name"""
    try:
        shape = fitted(one, shapes.get(one.name, ()))
    except ValueError as error:
        raise click.UsageError(f"--shape: {error}") from error
    if -1 in shape:
        raise click.UsageError(f"input {one.name} has dimensions of any size: give --shape {one.name}:N,...")
    if one.datatype == "BYTES":
        return from_numpy(one.name, np.full(shape, b"a", dtype=np.object_))
    return encoded(one, chance.random(shape) if one.datatype in FLOATS else chance.integers(0, 2, shape))


def fitted(one: Input, sizes: Sequence[int]) -> tuple[int, ...]:
    """The input's shape with these sizes as its last ones. Raises ValueError for sizes that the model would refuse."""
    first = len(one.shape) - len(sizes)
    if first < 0 or any(known not in (-1, size) for known, size in zip(one.shape[first:], sizes, strict=True)):
        raise ValueError(f"input {one.name} has the shape {list(one.shape)}, which {list(sizes)} does not fit")
    return (*one.shape[:first], *sizes)


def encoded(one: Input, numbers: NDArray[Any]) -> Tensor:
    """The input's tensor of these numbers. Raises ValueError for numbers that its type does not have."""
    with np.errstate(all="ignore"):
        if one.datatype in FLOATS:
            return Tensor(one.name, one.datatype, numbers.shape, float_bytes(one.datatype, numbers))
        values = numbers.astype(NUMPY_TYPE[one.datatype])
    if not np.array_equal(values, numbers):
        raise ValueError(f"input {one.name} has numbers that {one.datatype} does not have")
    return from_numpy(one.name, values, one.datatype)


def read_sequences(path: Path, inputs: Sequence[Input]) -> list[list[Step]]:
    """The sequences of a file; steps that stand for themselves are sequences of one step.

    raises  click.UsageError for a file that is not in perf_analyzer's form, or does not fit the model
    """
    try:
        entries = json.loads(path.read_text())["data"]
        found = [
            [step_of(step, inputs) for step in (cast("list[Any]", entry) if isinstance(entry, list) else [entry])]
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else error
        raise click.UsageError(f"--input-data {path}: not in the form of perf_analyzer ({reason})") from error
    if not found or not all(found):
        raise click.UsageError(f"--input-data {path}: no steps")
    return found


def step_of(entry: Mapping[str, Any], inputs: Sequence[Input]) -> Step:
    """The tensors of one step of an `--input-data` file. Raises ValueError for an input that the model lacks."""
    if unknown := set(entry) - {one.name for one in inputs}:
        raise ValueError(f"the model has no input {', '.join(sorted(unknown))}")
    return tuple(given_tensor(one, entry[one.name]) for one in inputs if one.name in entry)


def given_tensor(one: Input, given: Any) -> Tensor:
    """A tensor of a file. Without a shape it is the metadata's, where a single open dimension takes what is left."""
    members = cast("dict[str, Any]", given) if isinstance(given, dict) else {"content": given}
    shape = one.shape
    if "shape" in members:
        shape = fitted(one, [int(size) for size in members["shape"]])
    if "b64" in members:
        data = base64.b64decode(members["b64"], validate=True)
        shape = sized(one, shape, None)
        if one.datatype != "BYTES" and len(data) != math.prod(shape) * ELEMENT_BYTES[one.datatype]:
            raise ValueError(f"input {one.name} has {len(data)} bytes")
        return Tensor(one.name, one.datatype, shape, data)
    content: Any = np.asarray(members["content"])
    shape = sized(one, shape, int(content.size))
    if one.datatype == "BYTES":
        return from_numpy(one.name, content.astype(np.str_).reshape(shape))
    return encoded(one, content.reshape(shape))


def sized(one: Input, shape: tuple[int, ...], count: int | None) -> tuple[int, ...]:
    """A shape in which at most one dimension was open."""
    if -1 not in shape:
        return shape
    rest = math.prod(size for size in shape if size != -1)
    if count is None or shape.count(-1) > 1 or not rest or count % rest:
        raise ValueError(f"input {one.name} needs a shape")
    return tuple(count // rest if size == -1 else size for size in shape)
