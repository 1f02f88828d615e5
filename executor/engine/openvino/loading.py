"""Completes a configuration from an OpenVINO model, and makes an engine of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.engine.base import LoadRequest
from executor.engine.error_texts import quoted
from executor.engine.openvino.session import compiled, open_model, options_of, signature_of
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.sessions import completion
from executor.engine.sessions.checks import checked_call
from executor.engine.sessions.forward import Lent
from executor.engine.sessions.loading import existing, make_engine, refuse_gpu
from executor.engine.sessions.signature import SessionSignature
from shared.contract.errors import LoadError
from shared.contract.model_config import FixedShape

MODEL_FILE = "model.xml"
FAILURE = "openvino error"


def completed(config_json: str, version_dir: Path) -> str:
    """The configuration with what the model says. Raises ConfigError and LoadError."""

    def opened(config: Mapping[str, Any]) -> SessionSignature:
        return signature_of(open_model(_path(version_dir, config), config), config)

    return completion.completed(config_json, opened)


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model. Raises LoadError with the reason."""
    config, told = request.config, json.loads(request.config_json)
    refuse_gpu(request, "openVINO")
    # One thread adds up in one order.
    fixed_threads = 0 if config.fixed_shape is FixedShape.OFF else 1
    options = options_of(told, fixed_threads=fixed_threads)
    model = open_model(_path(request.model_dir / request.version, told), told)
    if config.sequence_batching and (variables := model.get_variables()):
        names = quoted(variable.get_info().variable_id for variable in variables)
        raise LoadError(
            f"unable to load model '{config.name}': it keeps {names} in itself, which all of its sequences would "
            "share; make inputs and outputs of them (docs/guides/backends.md has a program), and declare these in "
            "sequence_batching"
        )
    call = checked_call(config, signature_of(model, told))
    run = compiled(model, call, options, config.name)
    return make_engine(request, call, Lent(call, run), failure=FAILURE, fixed_threads=fixed_threads)


def _path(version_dir: Path, config: Mapping[str, Any]) -> Path:
    return existing(version_dir / (config.get("default_model_filename") or MODEL_FILE))
