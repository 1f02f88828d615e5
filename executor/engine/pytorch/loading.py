"""Makes an engine from a model's file: TorchScript or an exported program, on its device, with its arguments bound."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch.export.passes import move_to_device_pass

from executor.engine.base import LoadRequest
from executor.engine.batch_tensors import check_batch_tensors
from executor.engine.pytorch.arena import StateArena
from executor.engine.pytorch.binding import bind_arguments, bind_outputs, program_arguments, script_arguments
from executor.engine.pytorch.engine import Forward, TorchEngine
from executor.engine.pytorch.signature import is_fixed, load_program, model_file, script_deprecation_ignored
from shared.contract.errors import LoadError
from shared.contract.model_config import FixedShape, ModelConfig


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model onto its device. Raises LoadError with the reason."""
    config = request.config
    check_batch_tensors(config)
    device = _device(request)
    threads = _threads(config)
    fixed_threads = 0
    if config.fixed_shape is not FixedShape.OFF:
        fixed_threads = threads or 1
        _choose_deterministic_kernels()
    elif threads:
        torch.set_num_threads(threads)
    path = model_file(request.model_dir / request.version, config.default_model_filename)
    if path.suffix == ".pt2":
        program = load_program(path)
        _check_batch_dimension(config, program)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        forward: Forward = cast("Forward", program.module())
        arguments = program_arguments(program)
    else:
        script = _load_script(path, device)
        forward, arguments = script, script_arguments(script)
    states = config.sequence_batching.states if config.sequence_batching else ()
    return TorchEngine(
        config,
        forward,
        bind_arguments(config, arguments),
        bind_outputs(config),
        StateArena(states, request.slots, request.model_dir, device, request.state_value_bytes_max),
        fixed_threads=fixed_threads,
    )


def _device(request: LoadRequest) -> torch.device:
    device = torch.device(request.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"model '{request.config.name}' asks for {request.device}, but torch sees "
            f"{torch.cuda.device_count()} GPUs here"
        )
    return device


def _threads(config: ModelConfig) -> int:
    """How many threads the configuration asks for; 0 if it does not say."""
    threads = config.parameters.get("torch_threads") or config.parameters.get("INTRA_OP_THREAD_COUNT") or "0"
    asked = "torch_threads" in config.parameters or "INTRA_OP_THREAD_COUNT" in config.parameters
    if not threads.isdecimal() or (asked and int(threads) < 1):
        raise LoadError(f"model '{config.name}': parameter torch_threads must be a positive number, not '{threads}'")
    return int(threads)


def _choose_deterministic_kernels() -> None:
    """Chooses kernels whose results do not vary from run to run, for the whole process. A kernel without such a form
    only warns; the test at load decides then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Otherwise every new tensor is filled before it is written: on a GPU, forty kernels per batch of an LSTM.
    cast("Any", torch.utils.deterministic).fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def _load_script(path: object, device: torch.device) -> torch.jit.ScriptModule:
    try:
        with script_deprecation_ignored():
            module = cast("torch.jit.ScriptModule", torch.jit.load(str(path), map_location=device))
    except (RuntimeError, ValueError, OSError) as error:
        raise LoadError(f"failed to load model '{path}': {error}") from error
    module.eval()
    return module


def _check_batch_dimension(config: ModelConfig, program: torch.export.ExportedProgram) -> None:
    """An exported program runs only with the sizes that it was exported for. Refuses it at load, not at the first
    batch.
    """
    if config.max_batch_size <= 1:
        return
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        value = values.get(name)
        if isinstance(value, torch.Tensor) and value.dim() and is_fixed(value.shape[0]):
            raise LoadError(
                f"model '{config.name}': argument '{name}' was exported with a fixed batch of {value.shape[0]}, but "
                f"max_batch_size is {config.max_batch_size}; export it with a dynamic dimension 0 (torch.export.Dim)"
            )
