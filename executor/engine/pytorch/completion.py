"""Completes a configuration from the model's file: inputs, outputs, states and the largest batch.

What the file's own signature says comes first (`signature`). Without one, an exported program tells its tensors, and a
TorchScript module of one argument is tried (`trial_steps`). A sequence model whose module keeps state in attributes has
them declared as states (`kept_state`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from executor.engine.pytorch.attributes import Changes
from executor.engine.pytorch.binding import program_arguments, returned_types, script_arguments
from executor.engine.pytorch.datatypes import TORCH_TYPE, datatype_of
from executor.engine.pytorch.kept_state import declared_states, refuse_problems
from executor.engine.pytorch.program_changes import program_changes
from executor.engine.pytorch.script_changes import script_changes
from executor.engine.pytorch.signature import (
    Signature,
    StateSignature,
    TensorSignature,
    argument_names,
    is_fixed,
    load_program,
    load_script,
    model_file,
    read_signature,
    taken_names,
)
from executor.engine.pytorch.trial_steps import tried_signature, values_after_a_step
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import StateSpec
from shared.contract.tensors import are_alike, config_type, shape_text

log = logging.getLogger(__name__)

REMEDY = (
    "declare its inputs and outputs (and states) in config.pbtxt, or save it with its signature: "
    "executor.engine.pytorch.signature.save_with_signature(model, path, signature)"
)


def completed(config_json: str, version_dir: Path) -> str:
    """Triton's JSON of a configuration, with the missing parts taken from the model.

    Raises ConfigError if model and configuration contradict each other, if something is missing that the model cannot
    tell, or if it keeps state that the mesh cannot keep; LoadError if the model's file cannot be read.
    """
    config: dict[str, Any] = json.loads(config_json)
    path = model_file(version_dir, config.get("default_model_filename", ""))
    signature = read_signature(path)
    incomplete = not config.get("input") or not config.get("output")
    has_sequences = "sequence_batching" in config
    model = _Model(path) if has_sequences or (incomplete and signature is None) else None
    if model is not None and incomplete and signature is None:
        signature = _signature_of(config, model)
    if signature is not None:
        _complete_all(config, signature)
    if model is not None and has_sequences and "sequence_recovery" not in (config.get("parameters") or {}):
        _complete_kept(config, model)
    return json.dumps(config)


def _complete_all(config: dict[str, Any], signature: Signature) -> None:
    _complete_batch_size(config, signature)
    if signature.max_batch_size and not int(config.get("max_batch_size", 0)):
        signature = _with_batch_in_dims(signature)
    _complete(config, config, "input", "name", signature.inputs)
    _complete(config, config, "output", "name", signature.outputs)
    if signature.states:
        _complete(config, config.setdefault("sequence_batching", {}), "state", "input_name", signature.states)


class _Model:
    """A model's file, opened only to be asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".pt2":
            self.program = load_program(path)
            self.module = cast("nn.Module", self.program.module())
            self.changes = program_changes(self.program, self.module)
            self.arguments = program_arguments(self.program)
            return
        script = load_script(path, torch.device("cpu"))
        self.module, self.arguments = script, script_arguments(script)
        self.changes = script_changes(script).of(script)


def _complete_kept(config: dict[str, Any], model: _Model) -> None:
    """Declares the states that the module keeps in its attributes, unless they are declared already."""
    name, batching = str(config.get("name")), config["sequence_batching"]
    refuse_problems(name, model.changes)
    declared: list[dict[str, Any]] = batching.get("state") or []
    names = {state.get("input_name", "") for state in declared}
    left = Changes(tuple(each for each in model.changes.attributes if not names >= {leaf.name for leaf in each.leaves}))
    if not left.attributes:
        return
    kept = {leaf.name for leaf in model.changes.leaves}
    found = values_after_a_step(config, model.module, model.arguments, left, kept)
    taken = {argument.name for argument in model.arguments}
    for spec in declared_states(left, found, batched=int(config.get("max_batch_size", 0)) > 0):
        if spec.input_name in taken:
            raise ConfigError(
                f"model '{name}' changes the attribute '{spec.input_name}' of its module, and has an argument of that "
                "name: rename one of them"
            )
        if spec.input_name not in names:
            declared.append(_declaration(spec))
    batching["state"] = declared


def _complete_batch_size(config: dict[str, Any], signature: Signature) -> None:
    configured = int(config.get("max_batch_size", 0))
    if configured > signature.max_batch_size:
        raise ConfigError(
            f"model '{config.get('name')}': max_batch_size is {configured}, but the model's signature allows "
            + (str(signature.max_batch_size) if signature.max_batch_size else "no batch dimension")
        )
    if configured == 0 and not config.get("input"):
        config["max_batch_size"] = signature.max_batch_size


def _with_batch_in_dims(signature: Signature) -> Signature:
    """The signature for a configuration whose shapes contain the batch dimension (max_batch_size 0)."""
    return Signature(
        tuple(msgspec.structs.replace(tensor, dims=(-1, *tensor.dims)) for tensor in signature.inputs),
        tuple(msgspec.structs.replace(tensor, dims=(-1, *tensor.dims)) for tensor in signature.outputs),
        tuple(msgspec.structs.replace(state, dims=(-1, *state.dims)) for state in signature.states),
    )


def _complete(
    config: dict[str, Any],
    part: dict[str, Any],
    field: str,
    key: str,
    tensors: Sequence[TensorSignature | StateSignature],
) -> None:
    """Declares the tensors in a part of the configuration; where there are declarations, compares them.

    key  by which a declaration is found
    """
    declared: list[dict[str, Any]] = part.get(field) or []
    if not declared:
        part[field] = [_declaration(tensor) for tensor in tensors]
        return
    by_name = {getattr(tensor, key): tensor for tensor in tensors}
    for declaration in declared:
        tensor = by_name.get(declaration.get(key, ""))
        if tensor is not None:
            _check(config, field, declaration, tensor.datatype, tensor.dims)


def _check(
    config: dict[str, Any], field: str, declaration: dict[str, Any], datatype: str, dims: tuple[int, ...]
) -> None:
    name = declaration.get("name") or declaration.get("input_name")
    reshape = declaration.get("reshape")
    shape = reshape.get("shape", []) if reshape is not None else declaration.get("dims", [])
    given = tuple(int(dim) for dim in shape)
    if declaration.get("data_type") != config_type(datatype) or not are_alike(given, dims):
        raise ConfigError(
            f"model '{config.get('name')}': {field} '{name}' is configured as {declaration.get('data_type')} "
            f"{shape_text(given)}, but the model's signature says {config_type(datatype)} {shape_text(dims)}"
        )


def _declaration(tensor: TensorSignature | StateSignature | StateSpec) -> dict[str, Any]:
    names = {name: value for name, value in msgspec.structs.asdict(tensor).items() if name.endswith("name")}
    return {**names, "data_type": config_type(tensor.datatype), "dims": list(tensor.dims)}


def _signature_of(config: dict[str, Any], model: _Model) -> Signature:
    if model.path.suffix == ".pt2":
        return _signature_of_graph(model.program, config)
    name = config.get("name")
    found = None
    if not config.get("input") and not (config.get("sequence_batching") or {}).get("state"):
        found = tried_signature(config, model.module, model.arguments, model.changes)
    if found is None:
        raise ConfigError(
            f"model '{name}' declares no inputs or outputs, and {model.path.name} does not say what they are: " + REMEDY
        )
    log.warning(
        "model '%s' declares no inputs or outputs, and its file does not say what they are. By trial, %s. If that is "
        "not meant, %s",
        name,
        ", ".join(
            f"{kind} '{tensor.name}' is {tensor.datatype} {shape_text(tensor.dims)}"
            for kind, tensors in (("input", found.inputs), ("output", found.outputs))
            for tensor in tensors
        ),
        REMEDY,
    )
    return found


def _signature_of_graph(program: torch.export.ExportedProgram, config: dict[str, Any]) -> Signature:
    batch_size = int(config.get("max_batch_size", 0))
    taken, state_outputs = taken_names(config)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [
        _tensor_signature(name, values.get(node), batched=batch_size > 0)
        for name, node in zip(argument_names(program), program.graph_signature.user_inputs, strict=True)
        if name not in taken
    ]
    outputs = [
        _tensor_signature(name, values.get(node), batched=batch_size > 0)
        for name, node in zip(_output_names(program, state_outputs), program.graph_signature.user_outputs, strict=True)
        if name not in state_outputs
    ]
    return Signature(tuple(inputs), tuple(outputs), max_batch_size=batch_size)


def _output_names(program: torch.export.ExportedProgram, state_outputs: Sequence[str]) -> list[str]:
    spec = program.call_spec.out_spec
    if unfit := {key: what for key, what in returned_types(program).items() if what not in TORCH_TYPE}:
        told = ", ".join(f"{what} as '{key}'" for key, what in unfit.items())
        raise LoadError(f"forward returns {told}; declare the model's inputs and outputs without it")
    if spec is not None and spec.type is dict:
        return [str(key) for key in spec.context]
    count = len(program.graph_signature.user_outputs)
    plain = [f"OUTPUT__{index}" for index in range(count - len(state_outputs))]
    return [*plain, *state_outputs]


def _tensor_signature(name: str, value: object, *, batched: bool) -> TensorSignature:
    if not isinstance(value, torch.Tensor):
        raise LoadError(f"'{name}' of the program is no tensor; declare the model's inputs and outputs without it")
    dims = tuple(size if is_fixed(size) else -1 for size in value.shape)
    return TensorSignature(name, datatype_of(name, value.dtype), dims[1:] if batched else dims)
