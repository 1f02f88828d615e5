"""A torch model's signature: names, datatypes and shapes of its tensors, and which of them are state.

TorchScript knows the names of forward's arguments but neither datatypes nor shapes, and no torch format knows which
tensors are implicit state. So a signature may be stored inside the model's archive, as the extra file
`seqmesh_signature.json`. The signature of an exported program without that file is read from its graph: then all its
tensors are inputs and outputs, except those that the configuration declares as states or controls.

With a signature, a configuration may leave out `input`, `output`, `state` and `max_batch_size`.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from shared.contract.errors import LoadError

SIGNATURE_FILE = "seqmesh_signature.json"
SCRIPT_FILE = "model.pt"
EXPORTED_FILE = "model.pt2"


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
    except zipfile.BadZipFile as error:
        raise LoadError(f"cannot read {path}: it is not as torch.jit.save or torch.export.save writes it") from error
    except OSError as error:
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


def taken_names(config: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """Names that are no declared inputs in a decoded configuration: controls, states and targets of batch inputs. And
    the names of the states among the outputs, in order.
    """
    batching: dict[str, Any] = config.get("sequence_batching") or {}
    states: list[dict[str, Any]] = batching.get("state") or []
    controls: list[dict[str, Any]] = batching.get("control_input") or []
    batch_inputs: list[dict[str, Any]] = config.get("batch_input") or []
    taken = {state.get("input_name", "") for state in states} | {control.get("name", "") for control in controls}
    taken |= {name for entry in batch_inputs for name in entry.get("target_name", ())}
    return taken, [state.get("output_name", "") for state in states]


def load_script(path: Path, device: torch.device) -> torch.jit.ScriptModule:
    """The TorchScript module in a file, in evaluation mode. Raises LoadError."""
    try:
        with script_deprecation_ignored():
            module = cast("torch.jit.ScriptModule", torch.jit.load(str(path), map_location=device))
    except (RuntimeError, ValueError, OSError) as error:
        if _is_saved_object(path):
            reason = "it was written by torch.save and has no code; write it with torch.jit.save or torch.export.save"
            raise LoadError(f"failed to load model '{path}': {reason}") from error
        raise LoadError(f"failed to load model '{path}': {error}") from error
    module.eval()
    if not hasattr(module, "forward"):
        # A recurrent module of torch that was scripted by itself is such a file: its forward is one of several.
        reason = "its module has no method forward; script a module of yours that calls it in a forward of its own"
        raise LoadError(f"failed to load model '{path}': {reason}")
    return module


def _is_saved_object(path: Path) -> bool:
    """Whether a file is the archive of a Python object, such as weights, and not of a TorchScript module. Torch itself
    then says that the file is corrupted.
    """
    files = {name.rpartition("/")[2] for name in _names_in(path)}
    return "data.pkl" in files and "constants.pkl" not in files


def _names_in(path: Path) -> list[str]:
    """The names of the files in an archive; empty if the file is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The exported program in a file. Raises LoadError."""
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises whatever the damage leads to
        if _is_compiled(path):
            reason = "it was compiled by AOTInductor, which is not served; write the program with torch.export.save"
            raise LoadError(f"failed to load model '{path}': {reason}") from error
        raise LoadError(f"cannot load {path}: {error}") from error


def _is_compiled(path: Path) -> bool:
    """Whether a file is a package of compiled code, as AOTInductor writes it."""
    return any("/aotinductor/" in name for name in _names_in(path))


def argument_names(program: torch.export.ExportedProgram) -> list[str]:
    """Forward's argument names, in the order of the program's inputs. Raises LoadError for nested arguments."""
    signature = program.module_call_graph[0].signature
    # Older torch does not record the names. The graph's names are the same unless an argument shadows a builtin.
    names: list[str] = getattr(signature, "forward_arg_names", None) or [*map(str, program.graph_signature.user_inputs)]
    if len(names) != len(program.graph_signature.user_inputs):
        raise LoadError(f"forward({', '.join(names)}) takes more than plain tensors; each argument must be one tensor")
    return names


def placeholders(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """What a program's graph was exported with, by the names of its inputs: tensors that have no memory, for instance,
    of parameters, buffers, constants and arguments. In the order of the inputs.
    """
    return {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}


def is_fixed(size: object) -> bool:
    """Whether a size in a program's graph is a number, rather than a symbol for any number."""
    return isinstance(size, int)
