"""Completes a configuration from a SavedModel, and makes an engine of one, or of a frozen graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.engine.base import LoadRequest
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.sessions import completion
from executor.engine.sessions.checks import checked_call
from executor.engine.sessions.forward import Lent
from executor.engine.sessions.loading import existing, make_engine, refuse_gpu
from executor.engine.sessions.signature import SessionSignature
from executor.engine.tensorflow.session import TensorflowModel, open_graph, open_saved_model
from executor.engine.tensorflow.variables import written_variable
from shared.contract.errors import LoadError
from shared.contract.model_config import FixedShape

GRAPH_PLATFORM = "tensorflow_graphdef"
SAVED_MODEL, GRAPH = "model.savedmodel", "model.graphdef"
FAILURE = "TensorFlow error"


def completed(config_json: str, version_dir: Path) -> str:
    """The configuration with what a SavedModel says. A graph says too little, as in Triton.
    Raises ConfigError and LoadError.
    """

    def opened(config: Mapping[str, Any]) -> SessionSignature:
        model = _open(version_dir, config)
        model.session.close()
        return model.signature

    if json.loads(config_json).get("platform") == GRAPH_PLATFORM:
        return config_json
    return completion.completed(config_json, opened)


def load(request: LoadRequest) -> TorchEngine:
    """Loads the model. Raises LoadError with the reason."""
    config = request.config
    refuse_gpu(request, "tensorflow")
    if config.fixed_shape is not FixedShape.OFF:
        raise LoadError(
            f"model '{config.name}': the backend tensorflow has no fixed_shape: all models of a process share its "
            "threads, and how a sum is rounded depends on their number"
        )
    model = _open(request.model_dir / request.version, json.loads(request.config_json))
    call = checked_call(config, model.signature)
    fetches = [model.fetches[name] for name in call.outputs]
    if config.sequence_batching and (written := written_variable(model.session.graph.as_graph_def(), fetches)):
        raise LoadError(
            f"unable to load model '{config.name}': it writes to its own variables ({written}), which all of its "
            "sequences would share; export it with its states as inputs and outputs, and declare them in "
            "sequence_batching"
        )
    return make_engine(request, call, Lent(call, model.run_of(call)), failure=FAILURE)


def _open(version_dir: Path, config: Mapping[str, Any]) -> TensorflowModel:
    is_graph = config.get("platform") == GRAPH_PLATFORM
    path = existing(version_dir / (config.get("default_model_filename") or (GRAPH if is_graph else SAVED_MODEL)))
    return open_graph(path, config) if is_graph else open_saved_model(path, config)
