"""A torch model's signature: names, datatypes and shapes of its tensors, and which of them are state.

TorchScript knows the names of forward's arguments but neither datatypes nor shapes, and no torch format knows which
tensors are implicit state. So a signature may be stored inside the model's archive, as the extra file
`seqmesh_signature.json`. The signature of an exported program without that file is read from its graph: then all its
tensors are inputs and outputs, except those that the configuration declares as states or controls.

With a signature, a configuration may leave out `input`, `output`, `state` and `max_batch_size`.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.engine import shapes
from executor.engine.pytorch.datatypes import DATATYPE
from shared.contract.errors import ConfigError, LoadError

SIGNATURE_FILE = "seqmesh_signature.json"
SCRIPT_FILE = "model.pt"
EXPORTED_FILE = "model.pt2"
REMEDY = (
    "declare its inputs and outputs (and states) in config.pbtxt, or save it with its signature: "
    "executor.engine.pytorch.signature.save_with_signature(model, path, signature)"
)


class TensorSignature(msgspec.Struct, frozen=True):
    """An input or output. dims: without the batch dimension when the model has one; -1 is variable."""

    name: str
    datatype: str
    dims: tuple[int, ...]


class StateSignature(msgspec.Struct, frozen=True):
    """A tensor that forward takes under one name, and returns as the next state under another (or the same) name."""

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]


class Signature(msgspec.Struct, frozen=True):
    """What a model takes and returns.

    datatypes       wire names: FP32, INT64, BYTES, ...
    max_batch_size  largest batch that the model was made for; 0 if its tensors have no batch dimension
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    states: tuple[StateSignature, ...] = ()
    max_batch_size: int = 0


@contextmanager
def script_deprecation_ignored() -> Generator[None]:
    """Keeps torch's advice to move from TorchScript to torch.export out of the operator's log: both are served here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\..* is deprecated", category=DeprecationWarning)
        yield


def save_with_signature(
    model: torch.jit.ScriptModule | torch.export.ExportedProgram, path: Path, signature: Signature
) -> None:
    """Saves a scripted module (`model.pt`) or an exported program (`model.pt2`) with its signature inside."""
    extra = {SIGNATURE_FILE: msgspec.json.encode(signature).decode()}
    if isinstance(model, torch.export.ExportedProgram):
        torch.export.save(model, path, extra_files=extra)
        return
    with script_deprecation_ignored():
        torch.jit.save(model, str(path), _extra_files=extra)


def read_signature(path: Path) -> Signature | None:
    """The signature in a model's archive, or None. Raises LoadError if the signature or the archive is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [name for name in archive.namelist() if name.endswith(f"/extra/{SIGNATURE_FILE}")]
            content = archive.read(entries[0]) if entries else None
        return msgspec.json.decode(content, type=Signature) if content is not None else None
    except (OSError, zipfile.BadZipFile) as error:
        raise LoadError(f"cannot read {path}: {error}") from error
    except msgspec.MsgspecError as error:
        raise LoadError(f"{SIGNATURE_FILE} in {path}: {error}") from error


def model_file(version_dir: Path, default_model_filename: str) -> Path:
    """The file to load: the configured one, else `model.pt`, else `model.pt2`. Raises LoadError."""
    names = [default_model_filename] if default_model_filename else [SCRIPT_FILE, EXPORTED_FILE]
    for name in names:
        if (version_dir / name).is_file():
            return version_dir / name
    raise LoadError(f"there is no {' or '.join(names)} in {version_dir}")


def completed(config_json: str, version_dir: Path) -> str:
    """Triton's JSON of a configuration, with the missing parts taken from the model's signature.

    Raises ConfigError if model and configuration contradict each other, or if something is missing that the model
    cannot tell; LoadError if the model's file cannot be read.
    """
    config: dict[str, Any] = json.loads(config_json)
    path = model_file(version_dir, config.get("default_model_filename", ""))
    signature = read_signature(path)
    incomplete = not config.get("input") or not config.get("output")
    if signature is None and incomplete:
        signature = _signature_of_graph(path, config)
    if signature is None:
        return config_json
    _complete_batch_size(config, signature)
    if signature.max_batch_size and not int(config.get("max_batch_size", 0)):
        signature = _with_batch_in_dims(signature)
    _complete(config, config, "input", "name", signature.inputs)
    _complete(config, config, "output", "name", signature.outputs)
    if signature.states:
        _complete(config, config.setdefault("sequence_batching", {}), "state", "input_name", signature.states)
    return json.dumps(config)


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
    if declaration.get("data_type") != config_type(datatype) or not _compatible(given, dims):
        raise ConfigError(
            f"model '{config.get('name')}': {field} '{name}' is configured as {declaration.get('data_type')} "
            f"{shapes.text(given)}, but the model's signature says {config_type(datatype)} {shapes.text(dims)}"
        )


def _compatible(given: Sequence[int], dims: Sequence[int]) -> bool:
    return len(given) == len(dims) and all(
        one == other or -1 in (one, other) for one, other in zip(given, dims, strict=True)
    )


def _declaration(tensor: TensorSignature | StateSignature) -> dict[str, Any]:
    names = {name: value for name, value in msgspec.structs.asdict(tensor).items() if name.endswith("name")}
    return {**names, "data_type": config_type(tensor.datatype), "dims": list(tensor.dims)}


def config_type(datatype: str) -> str:
    """A wire datatype as configurations name it."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _signature_of_graph(path: Path, config: dict[str, Any]) -> Signature:
    if path.suffix != ".pt2":
        raise ConfigError(
            f"model '{config.get('name')}' declares no inputs or outputs, and {path.name} does not say what they are: "
            + REMEDY
        )
    program = load_program(path)
    batch_size = int(config.get("max_batch_size", 0))
    batching: dict[str, Any] = config.get("sequence_batching") or {}
    states: list[dict[str, Any]] = batching.get("state") or []
    controls: list[dict[str, Any]] = batching.get("control_input") or []
    reserved: set[str] = {control["name"] for control in controls}
    reserved |= {state.get("input_name", "") for state in states}
    batch_inputs: list[dict[str, Any]] = config.get("batch_input") or []
    reserved |= {name for entry in batch_inputs for name in entry.get("target_name", ())}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [
        _tensor_signature(name, values[node], batched=batch_size > 0)
        for name, node in zip(argument_names(program), program.graph_signature.user_inputs, strict=True)
        if name not in reserved
    ]
    state_outputs = [state.get("output_name", "") for state in states]
    outputs = [
        _tensor_signature(name, values[node], batched=batch_size > 0)
        for name, node in zip(_output_names(program, state_outputs), program.graph_signature.user_outputs, strict=True)
        if name not in state_outputs
    ]
    return Signature(tuple(inputs), tuple(outputs), max_batch_size=batch_size)


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The exported program in a file. Raises LoadError."""
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises whatever the damage leads to
        raise LoadError(f"cannot load {path}: {error}") from error


def argument_names(program: torch.export.ExportedProgram) -> list[str]:
    """Forward's argument names, in the order of the program's inputs. Raises LoadError for nested arguments."""
    signature = program.module_call_graph[0].signature
    # Older torch does not record the names. The graph's names are the same unless an argument shadows a builtin.
    names: list[str] = getattr(signature, "forward_arg_names", None) or [*map(str, program.graph_signature.user_inputs)]
    if len(names) != len(program.graph_signature.user_inputs):
        raise LoadError(f"forward({', '.join(names)}) takes more than plain tensors; each argument must be one tensor")
    return names


def is_fixed(size: object) -> bool:
    """Whether a size in a program's graph is a number, rather than a symbol for any number."""
    return isinstance(size, int)


def _output_names(program: torch.export.ExportedProgram, state_outputs: Sequence[str]) -> list[str]:
    spec = program.call_spec.out_spec
    if spec is not None and spec.type is dict:
        return [str(key) for key in spec.context]
    count = len(program.graph_signature.user_outputs)
    plain = [f"OUTPUT__{index}" for index in range(count - len(state_outputs))]
    return [*plain, *state_outputs]


def _tensor_signature(name: str, value: torch.Tensor, *, batched: bool) -> TensorSignature:
    dims = tuple(size if is_fixed(size) else -1 for size in value.shape)
    return TensorSignature(name, DATATYPE[value.dtype], dims[1:] if batched else dims)
