"""Makes an engine from a model's file: TorchScript or an exported program, on its device, with its arguments bound."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from executor.engine import shapes
from executor.engine.base import LoadRequest
from executor.engine.batch_tensors import check_batch_tensors
from executor.engine.error_texts import quoted
from executor.engine.pytorch.arena import StateArena
from executor.engine.pytorch.attributes import Changes
from executor.engine.pytorch.batch_trial import settle_batches
from executor.engine.pytorch.binding import (
    Argument,
    Binding,
    DictionaryForward,
    bind_arguments,
    bind_outputs,
    program_arguments,
    returned_types,
    script_arguments,
    takes_dictionary,
)
from executor.engine.pytorch.completion import completed
from executor.engine.pytorch.datatypes import DATATYPE
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.kept_state import KeptForward, first_states, kept_forms
from executor.engine.pytorch.program_changes import program_changes
from executor.engine.pytorch.running_batch import GpuStreams
from executor.engine.pytorch.script_changes import FileChanges, script_changes
from executor.engine.pytorch.signature import is_fixed, load_program, load_script, model_file
from executor.engine.pytorch.switches import (
    Switches,
    note_without_effect,
    switches_of,
    threads_of,
    use_inter_op_threads,
)
from executor.engine.pytorch.threads import use_threads
from executor.engine.pytorch.weights import share_weights, weights_file
from shared.contract.errors import LoadError
from shared.contract.model_config import BatchInput, FixedShape, ModelConfig, TensorSpec
from shared.contract.tensors import shape_text

__all__ = ["completed", "load"]

log = logging.getLogger(__name__)


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model onto its device. Raises LoadError with the reason."""
    config = request.config
    check_batch_tensors(config)
    device = _device(request)
    threads = threads_of(config, "torch_threads", "INTRA_OP_THREAD_COUNT")
    fixed_threads = 0
    if config.fixed_shape is not FixedShape.OFF:
        fixed_threads = threads or 1
        _choose_deterministic_kernels()
    elif threads:
        use_threads(threads)
    use_inter_op_threads(config)
    switches = switches_of(config)
    path = model_file(request.model_dir / request.version, config.default_model_filename)
    found = None if path.suffix == ".pt2" else script_changes(load_script(path, torch.device("cpu")))
    if device.type == "cpu":
        return _engine(request, path, found, switches, fixed_threads, None)
    streams = GpuStreams(device, is_shared=switches.weight_sharing or (found is not None and found.forks))
    with streams.active():
        return _engine(request, path, found, switches, fixed_threads, streams)


def _engine(
    request: LoadRequest,
    path: Path,
    found: FileChanges | None,
    switches: Switches,
    fixed_threads: int,
    streams: GpuStreams | None,
) -> TorchEngine:
    config, device = request.config, torch.device(request.device)
    weights = weights_file(path, device)
    module, arguments, changes, returned = _load_module(config, path, found, device)
    note_without_effect(config, is_script=found is not None, on_gpu=streams is not None)
    changes_itself = bool(changes.attributes or changes.problems)
    if streams is not None and not changes_itself:
        streams.copy_beside()
    if switches.weight_sharing:
        share_weights(module, weights, {leaf.name for leaf in changes.leaves})
    keeps_apart = config.sequence_batching is None or config.sequence_recovery is not None
    forms = {} if keeps_apart else kept_forms(config, changes)
    firsts = first_states(config, changes, forms) if forms else {}
    places = bind_outputs(config, forms)
    _check_returned(config, places, returned)
    bindings = bind_arguments(config, arguments, forms)
    _check_exported(config, bindings)
    if takes_dictionary(arguments):
        module = DictionaryForward(module)
    kept = KeptForward(module, config, changes.attributes, forms, places) if forms else None
    engine = TorchEngine(
        config,
        kept or module,
        bindings,
        places,
        StateArena(config.states, request.slots, request.model_dir, device, request.state_value_bytes_max, firsts),
        fixed_threads=fixed_threads,
        switches=switches,
        streams=streams,
    )
    if kept is not None and kept.alone_because:
        engine.run_rows_alone(kept.alone_because)
    if kept is not None or not changes_itself:
        settle_batches(engine, config, request.slots, kept=kept, decides=changes.decides)
    if kept is not None:
        _tell_kept(request, kept, engine)
    elif changes_itself:
        _warn_of_shared(config, changes)
    return engine


def _load_module(
    config: ModelConfig, path: Path, found: FileChanges | None, device: torch.device
) -> tuple[nn.Module, list[Argument], Changes, Mapping[str | int, str]]:
    """The module of a file on its device, the arguments of its forward, what its forward changes in it, and what it is
    known to return. found: of TorchScript
    """
    if found is not None:
        script = load_script(path, device)
        return script, script_arguments(script), found.of(script), {}
    program = load_program(path)
    arguments = program_arguments(program)
    _check_batch_dimension(config, program, arguments)
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    module = cast("nn.Module", program.module())
    return module, arguments, program_changes(program, module), returned_types(program)


def _check_returned(config: ModelConfig, places: Mapping[str, int], returned: Mapping[str | int, str]) -> None:
    """Raises LoadError if a value that forward returns as an output or a state can be none, or has another datatype."""
    declared = {state.output_name: state.datatype for state in config.states}
    declared |= {spec.name: spec.datatype for spec in config.outputs}
    for name, place in places.items():
        what = returned.get(name) or returned.get(place)
        if what and what != declared[name]:
            raise LoadError(
                f"model '{config.name}': forward returns {what} as '{name}'; "
                f"it must be one tensor of {declared[name]}, as configured"
            )


def _tell_kept(request: LoadRequest, kept: KeptForward, engine: TorchEngine) -> None:
    log.info(
        "model '%s', instance %s: each sequence has its own %s of the module; %s",
        request.config.name,
        request.instance_name,
        quoted(kept.forms),
        f"each row is a call of its own, because {engine.alone_because}"
        if engine.alone_because
        else "rows share calls",
    )


def _warn_of_shared(config: ModelConfig, changes: Changes) -> None:
    names = quoted(leaf.name for leaf in changes.leaves)
    log.warning(
        "model '%s' %s, and its forward changes the module: what it keeps is shared by all requests to an "
        "instance (%s)",
        config.name,
        "says that it keeps its sequences apart" if config.sequence_batching else "has no sequences",
        "; ".join(filter(None, [names, *changes.problems])),
    )


def _device(request: LoadRequest) -> torch.device:
    device = torch.device(request.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"model '{request.config.name}' asks for {request.device}, but torch sees "
            f"{torch.cuda.device_count()} GPUs here"
        )
    return device


def _choose_deterministic_kernels() -> None:
    """Chooses kernels whose results do not vary from run to run, for the whole process. A kernel without such a form
    only warns; the test at load decides then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Otherwise every new tensor is filled before it is written: on a GPU, forty kernels per batch of an LSTM.
    cast("Any", torch.utils.deterministic).fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def _check_batch_dimension(
    config: ModelConfig, program: torch.export.ExportedProgram, arguments: Sequence[Argument]
) -> None:
    """An exported program runs only with the sizes that it was exported for. Refuses it at load, not at the first
    batch, if it cannot take batches of several sizes; and tells if the largest ones are beyond it.
    """
    if config.max_batch_size <= 1:
        return
    ranges = cast("dict[Any, Any]", program.range_constraints)
    most: dict[str, Any] = {}  # size of the first dimension -> argument, and the largest such size
    for argument in arguments:
        size: Any = argument.example.shape[0] if argument.example is not None and argument.example.dim() else None
        if is_fixed(size):
            raise LoadError(
                f"model '{config.name}': argument '{argument.name}' was exported with a fixed batch of {size}, but "
                f"max_batch_size is {config.max_batch_size}; export it with a dynamic dimension 0 (torch.export.Dim)"
            )
        if size is not None and (allowed := ranges.get(size.node.expr)) is not None:
            most.setdefault(str(size), (argument.name, allowed.upper))
    for name, bound in most.values():
        if bound < config.max_batch_size:
            log.warning(
                "model '%s': argument '%s' was exported for batches of at most %s rows, so the rows of larger ones run "
                "one by one: lower max_batch_size (%d), or export it with a larger max (torch.export.Dim)",
                config.name,
                name,
                bound,
                config.max_batch_size,
            )


def _check_exported(config: ModelConfig, bindings: Sequence[Binding]) -> None:
    """An exported program has the code for the datatypes and numbers of dimensions that it was exported with, and only
    looks at the sizes: with other ones it may give other numbers. Raises LoadError.
    """
    for binding in bindings:
        example, source = binding.argument.example, binding.source
        is_flat = isinstance(source, BatchInput) or (isinstance(source, TensorSpec) and source.allow_ragged_batch)
        if example is None or is_flat or not example.dim():
            continue
        dims = shapes.declared_by_model(source) if isinstance(source, TensorSpec) else getattr(source, "dims", (1,))
        given = (-1, *dims) if config.max_batch_size else tuple(dims)
        sizes = [size if is_fixed(size) else -1 for size in example.shape]
        datatype = DATATYPE.get(example.dtype, str(example.dtype))
        pairs = zip(sizes, given, strict=False)
        if (
            datatype != source.datatype
            or len(sizes) != len(given)
            or any(-1 not in pair and len({*pair}) > 1 for pair in pairs)
        ):
            raise LoadError(
                f"model '{config.name}': '{binding.name}' is {source.datatype} {shape_text(given)} by the "
                f"configuration, but argument '{binding.argument.name}' was exported as {datatype} {shape_text(sizes)}"
            )
