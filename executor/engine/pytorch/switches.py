"""The parameters of Triton's PyTorch backend that say how a module is run.

    INFERENCE_MODE               torch's inference mode; without it only gradients are off
    DISABLE_OPTIMIZED_EXECUTION  TorchScript's optimizer, which compiles for the shapes that it has seen
    ENABLE_JIT_EXECUTOR          TorchScript's profiling executor
    ENABLE_JIT_PROFILING         its profiling mode
    ENABLE_TENSOR_FUSER          its fuser of elementwise operators
    DISABLE_CUDNN                cuDNN, on a GPU
    ENABLE_CACHE_CLEANING        free memory of a GPU is given back after every batch
    ENABLE_WEIGHT_SHARING        a model's instances on one device have one copy of its weights
    INTER_OP_THREAD_COUNT        threads that run parts of a module beside each other; the first model decides

Executor, profiling and fuser are settings of the whole process, in Triton too. A model that names one sets it before
each of its batches; a model that names none takes what it finds.

Source: Triton pytorch_backend, model_state.cc (ParseParameters) and model_instance_state.cc (Execute); its README.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch

from shared.contract.errors import LoadError
from shared.contract.model_config import ModelConfig

_TRUTH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_SCRIPT_ONLY = ("DISABLE_OPTIMIZED_EXECUTION", "ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")
_GPU_ONLY = ("DISABLE_CUDNN", "ENABLE_CACHE_CLEANING")
_GONE = ("ENABLE_NVFUSER",)
"""Parameters of older Triton releases, for what torch has no longer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Switches:
    """How a module is run. None: as the process has it."""

    inference_mode: bool = True
    optimized: bool = True
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    tensor_fuser: bool | None = None
    cudnn: bool = True
    cache_cleaning: bool = False
    weight_sharing: bool = False

    @contextmanager
    def applied(self) -> Generator[None]:
        """For one call of a TorchScript module."""
        native = cast("Any", torch)._C  # noqa: SLF001 - these settings have no public names
        if self.jit_executor is not None:
            native._jit_set_profiling_executor(self.jit_executor)  # noqa: SLF001
        if self.jit_profiling is not None:
            native._jit_set_profiling_mode(self.jit_profiling)  # noqa: SLF001
        if self.tensor_fuser is not None:
            native._jit_set_texpr_fuser_enabled(self.tensor_fuser)  # noqa: SLF001
        with cast("Any", torch.jit).optimized_execution(self.optimized), nullcontext() if self.cudnn else cudnn_off():
            yield


_switching = Lock()
_before: list[bool] = []
"""How each of the calls without cuDNN that run now has found it."""


@contextmanager
def cudnn_off() -> Generator[None]:
    """Switches cuDNN off, and nothing else of it, in the process. It is on again when the last such call is over:
    instances compute beside each other.
    """
    cudnn = cast("Any", torch.backends.cudnn)
    with _switching:
        _before.append(cudnn.enabled)
        cudnn.enabled = False
    try:
        yield
    finally:
        with _switching:
            found = _before.pop()
            if not _before:
                cudnn.enabled = found


def switches_of(config: ModelConfig) -> Switches:
    """What a configuration asks for. Raises LoadError for a value that is neither true nor false."""
    return Switches(
        inference_mode=_flag(config, "INFERENCE_MODE", default=True),
        optimized=not _flag(config, "DISABLE_OPTIMIZED_EXECUTION"),
        jit_executor=_choice(config, "ENABLE_JIT_EXECUTOR"),
        jit_profiling=_choice(config, "ENABLE_JIT_PROFILING"),
        tensor_fuser=_choice(config, "ENABLE_TENSOR_FUSER"),
        cudnn=not _flag(config, "DISABLE_CUDNN"),
        cache_cleaning=_flag(config, "ENABLE_CACHE_CLEANING"),
        weight_sharing=_flag(config, "ENABLE_WEIGHT_SHARING"),
    )


def note_without_effect(config: ModelConfig, *, is_script: bool, on_gpu: bool) -> None:
    """Tells in the log which of these parameters change nothing for this instance."""
    reasons: dict[str, str] = dict.fromkeys(_GONE, "torch has no nvFuser any more")
    reasons |= {} if on_gpu else dict.fromkeys(_GPU_ONLY, "the instance runs on a CPU")
    reasons |= {} if is_script else dict.fromkeys(_SCRIPT_ONLY, "the model is an exported program, not TorchScript")
    for name in reasons.keys() & config.parameters.keys():
        log.warning("model '%s': parameter '%s' has no effect: %s", config.name, name, reasons[name])


def use_inter_op_threads(config: ModelConfig) -> None:
    """Sets the threads that run parts of a module beside each other. Torch takes the number once in a process, before
    its first use. Raises LoadError for what is no positive number.
    """
    count = threads_of(config, "INTER_OP_THREAD_COUNT")
    if count in (0, torch.get_num_interop_threads()):
        return
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        log.warning(
            "model '%s': parameter 'INTER_OP_THREAD_COUNT' has no effect: this process has %d such threads already",
            config.name,
            torch.get_num_interop_threads(),
        )


def threads_of(config: ModelConfig, *names: str) -> int:
    """The number of threads that a configuration gives by the first of these parameters that it has; 0 if it has none.
    Raises LoadError for what is no positive number.
    """
    name = next((name for name in names if name in config.parameters), None)
    if name is None:
        return 0
    text = config.parameters[name]
    if not text.isdecimal() or int(text) < 1:
        raise LoadError(f"model '{config.name}': parameter {name} must be a positive number, not '{text}'")
    return int(text)


def _flag(config: ModelConfig, name: str, *, default: bool = False) -> bool:
    chosen = _choice(config, name)
    return default if chosen is None else chosen


def _choice(config: ModelConfig, name: str) -> bool | None:
    text = config.parameters.get(name)
    if text is None:
        return None
    if text.lower() not in _TRUTH:
        raise LoadError(f"model '{config.name}': parameter {name} must be true or false, not '{text}'")
    return _TRUTH[text.lower()]
