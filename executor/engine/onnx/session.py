"""Opens an ONNX model: its tensors, and the session options that a configuration asks for.

Source: Triton onnxruntime backend, onnxruntime.cc (ModelState, LoadModel); its README, "Model Config Options".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime

from executor.engine.sessions.loading import existing
from executor.engine.sessions.signature import SessionSignature, SessionTensor, parameter_of
from shared.contract.errors import LoadError
from shared.contract.tensors import NUMPY_TYPE

ort: Any = onnxruntime  # its stubs do not cover what is used here
MODEL_FILE = "model.onnx"
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
FATAL = 4
"""Severity of what ONNX Runtime logs by itself. Whatever is less severe is raised as well, and told to the caller."""

WIRE_TYPE = {f"tensor({dtype.name})": name for name, dtype in NUMPY_TYPE.items()} | {
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
"""`optimization.graph.level` -> level of ONNX Runtime; any other number means all optimizations, as in Triton."""
_TRUTH = {"1": True, "true": True, "0": False, "false": False}
_ARENA_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_CONV_SEARCHES = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}


class OnnxModel(msgspec.Struct, frozen=True, eq=False):
    """An open model. Inputs that have a value of their own (overridable initializers) are optional."""

    session: Any
    signature: SessionSignature


def model_path(version_dir: Path, default_model_filename: str) -> Path:
    """The model's file; of a directory, the `model.onnx` in it. Raises LoadError."""
    path = version_dir / (default_model_filename or MODEL_FILE)
    return existing(path / MODEL_FILE if path.is_dir() else path)


def open_model(path: Path, config: Mapping[str, Any], device: str = "cpu", *, fixed_threads: int = 0) -> OnnxModel:
    """Opens a model on a device.

    config         Triton's JSON of the configuration, decoded
    device         "cpu" or "cuda:<n>"
    fixed_threads  with `fixed_shape`, threads that compute one operator; 0 without
    raises         LoadError
    """
    try:
        options = _session_options(config, fixed_threads)
        session = ort.InferenceSession(str(path), options, providers=_providers(config, device))
        nodes = session.get_inputs(), session.get_outputs(), session.get_overridable_initializers()
        return OnnxModel(session, SessionSignature(*map(_tensors, nodes)))
    except LoadError:
        raise
    except Exception as error:  # ONNX Runtime has an exception class for each of its codes, and no common one
        raise LoadError(f"failed to load model '{path}': onnx runtime error: {error}") from error


def _session_options(config: Mapping[str, Any], fixed_threads: int) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    optimization: dict[str, Any] = config.get("optimization") or {}
    graph: dict[str, Any] = optimization.get("graph") or {}
    level = _GRAPH_LEVELS.get(int(graph.get("level", 0)), "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    if (mode := number_of(config, "execution_mode")) not in (0, 1):
        raise LoadError(
            f"Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got {mode} ."
        )
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if mode else ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = fixed_threads or max(0, number_of(config, "intra_op_thread_count"))
    options.inter_op_num_threads = max(0, number_of(config, "inter_op_thread_count"))
    options.use_deterministic_compute = bool(fixed_threads)
    if parameter_of(config, "enable_mem_arena"):
        options.enable_cpu_mem_arena = _flag(config, "enable_mem_arena")
    if parameter_of(config, "enable_mem_pattern"):
        options.enable_mem_pattern = _flag(config, "enable_mem_pattern")
    allocator = "session.use_device_allocator_for_initializers"
    if value := parameter_of(config, allocator):
        options.add_session_config_entry(allocator, value)
    return options


def run_options_of(config: Mapping[str, Any]) -> Any:
    """What each call of the session is given."""
    options, shrinkage = ort.RunOptions(), "memory.enable_memory_arena_shrinkage"
    if value := parameter_of(config, shrinkage):
        options.add_run_config_entry(shrinkage, value)
    return options


def _providers(config: Mapping[str, Any], device: str) -> Sequence[Any]:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return [CPU]
    if CUDA not in ort.get_available_providers():
        raise LoadError(
            f"model '{config.get('name')}' asks for {device}, and the onnxruntime that is installed here has no CUDA: "
            "install onnxruntime-gpu in its place, or give the model an instance_group of KIND_CPU"
        )
    cuda = {"device_id": index or "0"}
    for name, choices in (("cudnn_conv_algo_search", _CONV_SEARCHES), ("arena_extend_strategy", _ARENA_STRATEGIES)):
        if value := parameter_of(config, name):
            if value not in choices:
                raise LoadError(f"unsupported {name} value '{value}' is requested")
            cuda[name] = choices[value]
    for name in ("gpu_mem_limit", "do_copy_in_default_stream"):
        if value := parameter_of(config, name):
            cuda[name] = value
    return [(CUDA, cuda), CPU]


def number_of(config: Mapping[str, Any], name: str) -> int:
    """A parameter's number; 0 if it is not given. Raises LoadError for what is none."""
    text = parameter_of(config, name) or "0"
    try:
        return int(text)
    except ValueError:
        raise LoadError(f"model '{config.get('name')}': parameter {name} must be a number, not '{text}'") from None


def _flag(config: Mapping[str, Any], name: str) -> bool:
    text = parameter_of(config, name)
    if text.lower() not in _TRUTH:
        raise LoadError(f"model '{config.get('name')}': parameter {name} must be true or false, not '{text}'")
    return _TRUTH[text.lower()]


def _tensors(nodes: Sequence[Any]) -> Mapping[str, SessionTensor]:
    return {node.name: _tensor(node) for node in nodes}


def _tensor(node: Any) -> SessionTensor:
    if node.type not in WIRE_TYPE:
        # What skl2onnx makes of a classifier if it is not told otherwise.
        remedy = "; export it as a tensor (skl2onnx: options={'zipmap': False})" if "map(" in node.type else ""
        raise LoadError(f"tensor '{node.name}' of the model is a {node.type}, which no request can carry{remedy}")
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in node.shape)
    return SessionTensor(node.name, WIRE_TYPE[node.type], dims)
