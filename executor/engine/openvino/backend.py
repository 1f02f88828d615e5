"""The backend `openvino`: models in OpenVINO's own format (`model.xml`), and in those that it reads.

This module imports neither torch nor openvino, so that an executor without such models never pays for them.
"""

from __future__ import annotations

from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class OpenvinoBackend:
    """Runs models with OpenVINO on CPUs. States, batches and outputs are those of the torch engine."""

    name = "openvino"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in inputs, outputs and the largest batch from the model. Raises ConfigError."""
        from executor.engine.openvino import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model. Raises LoadError with the reason."""
        from executor.engine.openvino import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.load(request)
