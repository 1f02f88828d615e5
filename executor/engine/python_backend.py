"""The backend `python`: models written as Triton's `model.py` (triton-spec 8)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from executor.engine.base import Engine, LoadRequest
from executor.engine.python_engine import PythonEngine
from executor.engine.python_model import error_text, forget, import_model_class, model_dir_known, model_path
from executor.engine.triton_python_backend_utils import ModelConfig
from shared.errors import ConfigError, LoadError

log = logging.getLogger(__name__)


class PythonBackend:
    """Runs `TritonPythonModel` in the executor's own process."""

    name = "python"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """What the model's `auto_complete_config` makes of the configuration; unchanged when it has none.

        Raises ConfigError when the model refuses the configuration, LoadError when it cannot be imported.
        """
        config: dict[str, Any] = json.loads(config_json)
        path = model_path(version_dir, config.get("default_model_filename", ""))
        # Importing a model can take seconds; most have no such function.
        if b"auto_complete_config" not in path.read_bytes():
            return config_json
        model_class = import_model_class(path)
        try:
            return self._completed(model_class, config_json, config.get("name", ""), path)
        finally:
            forget(model_class)

    def _completed(self, model_class: type[Any], config_json: str, name: str, path: Path) -> str:
        complete = getattr(model_class, "auto_complete_config", None)
        if complete is None:
            return config_json
        try:
            with model_dir_known(str(path.parent)):
                completed = complete(ModelConfig(config_json))
        except Exception as error:  # the model's own code
            raise ConfigError(f"auto_complete_config of model '{name}': {error_text(error)}") from error
        if not isinstance(completed, ModelConfig):
            raise ConfigError(
                f"auto_complete_config of model '{name}' must return the ModelConfig it was given, "
                f"not {type(completed).__name__}"
            )
        return completed.to_json()

    def load(self, request: LoadRequest) -> Engine:
        """Imports and initialises one instance. Raises LoadError with the model's own error."""
        config: dict[str, Any] = json.loads(request.config_json)
        if (config.get("model_transaction_policy") or {}).get("decoupled"):
            raise LoadError(
                f"model '{request.config.name}' is decoupled (model_transaction_policy), which seqmesh does not support"
            )
        if request.config.batch_inputs or request.config.batch_outputs:
            log.warning(
                "model '%s': batch_input and batch_output have no effect, as in Triton: a python model is given each "
                "request apart",
                request.config.name,
            )
        return PythonEngine(request)
