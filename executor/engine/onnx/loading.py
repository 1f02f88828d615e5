"""Completes a configuration from an ONNX model, and makes an engine of one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from executor.engine.base import LoadRequest
from executor.engine.onnx.forward import compute_of
from executor.engine.onnx.session import model_path, number_of, open_model, run_options_of
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.sessions import completion
from executor.engine.sessions.checks import checked_call
from executor.engine.sessions.loading import make_engine
from shared.contract.model_config import FixedShape

FAILURE = "onnx runtime error"


def completed(config_json: str, version_dir: Path) -> str:
    """The configuration with what the model says. Raises ConfigError and LoadError."""
    return completion.completed(
        config_json,
        lambda config: open_model(model_path(version_dir, config.get("default_model_filename", "")), config).signature,
    )


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model onto its device. Raises LoadError with the reason."""
    config, told, fixed_threads = request.config, json.loads(request.config_json), 0
    if config.fixed_shape is not FixedShape.OFF:
        fixed_threads = max(1, number_of(told, "intra_op_thread_count"))
    path = model_path(request.model_dir / request.version, config.default_model_filename)
    model = open_model(path, told, request.device, fixed_threads=fixed_threads)
    call = checked_call(config, model.signature)
    compute = compute_of(model, call, torch.device(request.device), run_options_of(told))
    return make_engine(request, call, compute, failure=FAILURE, fixed_threads=fixed_threads)
