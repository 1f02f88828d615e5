"""Learns from trial calls of a TorchScript module what its file does not say.

TorchScript knows neither datatypes nor shapes. Two things are worth a trial: the shape of an attribute that is None or
empty until the first step, and the input and the outputs of a module whose configuration leaves them out. Every call
begins with the attributes as the file has them.

An input is found by trying datatypes and shapes, in a fixed order, until forward takes one: integers before floating
point, because forward takes integers of a vocabulary only, while what it computes with floating point usually refuses
integers; 32 bits before 64. A dimension is variable if two sizes work; else its size is one of the sizes of the
module's tensors. That is a guess, so it is told in the log, and a configuration that says otherwise wins. It is made
for modules with one argument only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from executor.configuration.build import sequence_specs, tensor_spec
from executor.configuration.rules.controls import check_controls
from executor.engine.error_texts import quoted
from executor.engine.pytorch.attributes import Changes
from executor.engine.pytorch.binding import Argument, bind_arguments
from executor.engine.pytorch.datatypes import DATATYPE, TORCH_TYPE
from executor.engine.pytorch.kept_state import is_unset
from executor.engine.pytorch.outputs import several
from executor.engine.pytorch.signature import Signature, TensorSignature
from shared.configuration.parse import parse_json
from shared.contract.errors import ConfigError
from shared.contract.model_config import ControlSpec, ModelConfig
from shared.contract.tensors import element_count

Fields = Mapping[str, Any]
"""A configuration, or a part of one, as JSON."""

TRIED_TYPES = ("INT32", "INT64", "FP32", "FP16", "FP64", "BOOL")
RANK_MAX = 3
_TWO_SIZES = (3, 5)
_VARIABLE_SIZES = (1, 8, 64, 512)
_ELEMENTS_MAX = 1 << 27
"""Of a made-up input: one of several variable dimensions would take all memory."""
_SIZES_MAX = 16
"""Sizes of the module's tensors that are tried for a dimension: the smallest ones."""


def values_after_a_step(
    config: Fields, module: Any, arguments: Sequence[Argument], changes: Changes, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """The leaves that are unset in the file, as the first step leaves them. The attributes are set back.

    changes  the attributes whose states the configuration does not declare
    kept     every leaf that forward changes: a state of that name is no argument
    raises   ConfigError if forward takes no made-up input, or leaves None
    """
    names = [leaf.name for leaf, value in changes.read() if is_unset(value)]
    if not names:
        return {}
    name = str(config.get("name"))
    found: dict[str, Any] | str = ""
    for size in _VARIABLE_SIZES:
        found = _stepped(config, module, arguments, changes, kept, size)
        if isinstance(found, dict):
            break
    if isinstance(found, str):
        raise _undeclared(
            name, names, f"before the first step, and forward takes no made-up input that would tell ({found})"
        )
    missing = [leaf for leaf in names if is_unset(found[leaf])]
    if missing:
        raise _undeclared(name, missing, "before the first step and after it")
    return {leaf: found[leaf] for leaf in names}


def _undeclared(model: str, names: Sequence[str], when: str) -> ConfigError:
    """The error for attributes whose shapes nothing tells, with the remedy."""
    return ConfigError(
        f"model '{model}': the shape of {quoted(names)}, which forward changes, is unknown: unset {when}. Declare each "
        "as a state, with its data_type, and with -1 for each of its dims"
    )


def _stepped(
    config: Fields, module: Any, arguments: Sequence[Argument], changes: Changes, kept: Collection[str], size: int
) -> dict[str, Any] | str:
    """Every leaf after a step of zeros; or why there was none."""
    batch = (1,) if int(config.get("max_batch_size", 0)) else ()
    given: dict[str, Any] = {}
    for binding in bind_arguments(_declared(config), arguments, kept):
        source = binding.source
        if binding.name in kept:
            continue
        dims = (1,) if isinstance(source, ControlSpec) else _model_dims(source)
        shape = (*batch, *(size if dim == -1 else dim for dim in dims))
        count = element_count(shape)
        if count > _ELEMENTS_MAX:
            return f"one of '{binding.name}' with dimensions of {size} is too large"
        given[binding.argument.name] = (
            [""] * count if source.datatype == "BYTES" else torch.zeros(shape, dtype=TORCH_TYPE[source.datatype])
        )
    try:
        with _copies_given(changes), torch.inference_mode():
            module(**given)
            return {leaf.name: value for leaf, value in changes.read()}
    except Exception as error:  # noqa: BLE001 - the model's own code
        return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


@contextmanager
def _copies_given(changes: Changes) -> Generator[None]:
    """Lets a call change copies of the attributes, and sets them back afterwards."""
    before = [attribute.read() for attribute in changes.attributes]
    for attribute, values in zip(changes.attributes, before, strict=True):
        attribute.write([value.clone() if isinstance(value, torch.Tensor) else value for value in values])
    try:
        yield
    finally:
        for attribute, values in zip(changes.attributes, before, strict=True):
            attribute.write(values)


def _model_dims(source: Any) -> tuple[int, ...]:
    reshape = getattr(source, "reshape", None)
    return tuple(source.dims if reshape is None else reshape)


def _declared(config: Fields) -> ModelConfig:
    """As much of a configuration as says what forward is given. Raises ConfigError for batch inputs, and for a
    declaration that says too little.
    """
    name = str(config.get("name"))
    if config.get("batch_input"):
        raise ConfigError(f"model '{name}' keeps state in its module and has batch inputs, which is not supported")
    batching: Fields = config.get("sequence_batching") or {}
    _check_fields(config.get("input"), "name", "data_type")
    _check_fields(batching.get("control_input"), "name")
    _check_fields(batching.get("state"), "input_name", "output_name", "data_type")
    message = parse_json(json.dumps(config))
    check_controls(message)
    for state in message.sequence_batching.state:
        state.use_growable_memory = False  # a first step finds it as its dims say
    inputs, sequences = tuple(map(tensor_spec, message.input)), sequence_specs(message, dialect=False)
    return ModelConfig(name, "pytorch", "", message.max_batch_size, inputs, (), sequence_batching=sequences)


def _check_fields(declarations: Sequence[Fields] | None, *fields: str) -> None:
    for declaration, field in itertools.product(declarations or (), fields):
        if not declaration.get(field):
            raise ConfigError(f"a declaration in the configuration must specify '{field}': {json.dumps(declaration)}")


# --- the input and the outputs


def tried_signature(
    config: Fields, module: nn.Module, arguments: Sequence[Argument], changes: Changes
) -> Signature | None:
    """What a module takes and returns, found by trial; None if it was not found, or has not exactly one argument."""
    required = [argument for argument in arguments if argument.required and not argument.is_dictionary]
    if len(arguments) != 1 or len(required) != 1:
        return None
    batch = int(config.get("max_batch_size", 0))
    trial = _Trial(module, changes, batched=batch > 0)
    for datatype in TRIED_TYPES:
        for dims in _shapes(module):
            outputs = trial.outputs(datatype, dims)
            if outputs is not None:
                return Signature((TensorSignature(required[0].name, datatype, dims),), outputs, (), batch)
    return None


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes that are tried, without the batch dimension: variable ones first, then those with the sizes of tensors."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    sizes = [*sorted({size for tensor in tensors for size in tensor.shape if size > 1})[:_SIZES_MAX], 1]
    for rank in range(1, RANK_MAX + 1):
        for last in (-1, *sizes):
            yield (*(-1,) * (rank - 1), last)
    for rank in range(2, RANK_MAX + 1):
        yield from itertools.product(sizes, repeat=rank) if len(sizes) ** rank <= _SIZES_MAX**2 else ()


class _Trial:
    """Calls a module with made-up tensors."""

    def __init__(self, module: nn.Module, changes: Changes, *, batched: bool) -> None:
        self._module = module
        self._changes = changes
        self._batch = (1,) if batched else ()

    def outputs(self, datatype: str, dims: Sequence[int]) -> tuple[TensorSignature, ...] | None:
        """The outputs for an input of that type and shape; None if forward does not take it."""
        found = [self._called(datatype, [size if dim == -1 else dim for dim in dims]) for size in _TWO_SIZES]
        small, large = found
        if small is None or large is None or small.keys() != large.keys():
            return None
        told: list[TensorSignature] = []
        for name, tensor in small.items():
            one, other = tuple(tensor.shape), tuple(large[name].shape)
            if len(one) != len(other) or one[: len(self._batch)] != self._batch or tensor.dtype not in DATATYPE:
                return None
            sizes = zip(one[len(self._batch) :], other[len(self._batch) :], strict=True)
            shape = tuple(size if size == again else -1 for size, again in sizes)
            if not shape or 0 in shape:
                return None
            told.append(TensorSignature(name, DATATYPE[tensor.dtype], shape))
        return tuple(told)

    def _called(self, datatype: str, shape: Sequence[int]) -> dict[str, torch.Tensor] | None:
        try:
            with _copies_given(self._changes), torch.inference_mode():
                returned = self._module(torch.zeros((*self._batch, *shape), dtype=TORCH_TYPE[datatype]))
        except Exception:  # noqa: BLE001 - the model's own code, and what it does not take is what is asked
            return None
        if isinstance(returned, dict):
            named = {str(key): value for key, value in cast("dict[Any, Any]", returned).items()}
        else:
            named = {f"OUTPUT__{index}": value for index, value in enumerate(several(returned))}
        if not named or not all(isinstance(value, torch.Tensor) for value in named.values()):
            return None
        return named
