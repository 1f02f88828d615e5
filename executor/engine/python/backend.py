"""The backend `python`: models written as Triton's `model.py` (triton-spec 8); and the backends that are such a file
themselves, and serve any number of models (Triton's python-based backends).
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.engine.base import Engine, LoadRequest
from executor.engine.python.decoupled import in_this_process
from executor.engine.python.model import model_path
from executor.engine.python.model_completion import LIMIT_S, completed_apart
from executor.engine.python.process.engine import ProcessEngine
from executor.engine.python.process.environments import Environment, environment_of

log = logging.getLogger(__name__)


class PythonBackend:
    """Runs `TritonPythonModel` in the executor's own process, or in one for each instance (`instance_process`).

    completion_limit_s  how long a model may take to complete its configuration
    name, code  of a python-based backend: its `model.py`. Models have none of their own then
    """

    def __init__(self, completion_limit_s: float = LIMIT_S, name: str = "python", code: Path | None = None) -> None:
        self.name = name
        self._completion_limit_s = completion_limit_s
        self._code = code
        self._completed_in: Environment | None = None
        """What an archive was unpacked to stays for the load that follows, for which this object is made."""

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """The configuration as the model's `auto_complete_config` completes it; unchanged if the model has none.

        It runs in a process of its own. Raises ConfigError if the model refuses the configuration, crashes or takes too
        long; LoadError if it cannot be imported.
        """
        config: dict[str, Any] = json.loads(config_json)
        path = self._code or model_path(version_dir, config.get("default_model_filename", ""))
        # A process and an import can take seconds; most models have no such function.
        if b"auto_complete_config" not in path.read_bytes():
            return config_json
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._completed_in = environment_of(parameters, version_dir.parent)
        return completed_apart(config_json, path, self._completion_limit_s, self._completed_in)

    def load(self, request: LoadRequest) -> Engine:
        """Imports and initialises one instance. Raises LoadError with the model's own error."""
        if request.config.batch_inputs or request.config.batch_outputs:
            log.warning(
                "model '%s': batch_input and batch_output have no effect, as in Triton: a python model is given each "
                "request apart",
                request.config.name,
            )
        if self._code is not None:
            request = replace(request, code=self._code)
        if request.config.instance_process:
            return ProcessEngine(request, environment_of(request.config.parameters, request.model_dir))
        before = _default_datatype()
        engine = in_this_process(request)
        if (now := _default_datatype()) != before:
            log.warning(
                "model '%s' sets torch's default datatype to %s for all models of this executor: the parameter "
                "instance_process keeps it to itself",
                request.config.name,
                now,
            )
        return engine


def _default_datatype() -> str:
    """Torch's, in this process; it is torch's own until a model has imported torch."""
    torch = sys.modules.get("torch")
    return "torch.float32" if torch is None else str(torch.get_default_dtype())
