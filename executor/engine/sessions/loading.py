"""Makes an engine of a session: states, batches and outputs are those of the torch engine."""

from __future__ import annotations

from pathlib import Path

import torch

from executor.engine.base import LoadRequest
from executor.engine.pytorch.arena import StateArena
from executor.engine.pytorch.batch_trial import settle_batches
from executor.engine.pytorch.binding import Argument, Binding, argument_sources
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.sessions.checks import SessionCall
from executor.engine.sessions.forward import Compute, SessionForward
from shared.contract.errors import LoadError


def make_engine(
    request: LoadRequest, call: SessionCall, compute: Compute, *, failure: str, fixed_threads: int = 0
) -> TorchEngine:
    """An engine that makes each call by `compute`, which is `Lent` or the runtime's own.

    failure        begins the error of a call that fails
    fixed_threads  as in `TorchEngine`
    raises         LoadError if a file of initial state cannot be used
    """
    config, device = request.config, torch.device(request.device)
    engine = TorchEngine(
        config,
        SessionForward(call, compute),
        tuple(
            Binding(Argument(name, None, required=name not in call.signature.optional), name, source)
            for name, source in argument_sources(config)
        ),
        {},
        StateArena(config.states, request.slots, request.model_dir, device, request.state_value_bytes_max),
        fixed_threads=fixed_threads,
        failure=failure,
    )
    settle_batches(engine, config, request.slots)
    return engine


def existing(path: Path) -> Path:
    """The path, if something is there. Raises LoadError, as Triton says it, if not."""
    if not path.exists():
        raise LoadError(f"unable to find '{path}'")
    return path


def refuse_gpu(request: LoadRequest, called: str) -> None:
    """Raises LoadError unless the model is for a CPU. called: the backend, as its makers write it"""
    if request.device != "cpu":
        raise LoadError(
            f"unable to load model '{request.config.name}', {called} backend supports only CPU device; give it an "
            "instance_group of KIND_CPU"
        )
