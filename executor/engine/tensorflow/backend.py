"""The backend `tensorflow`: SavedModels (`model.savedmodel`) and frozen graphs (`model.graphdef`).

This module imports neither torch nor tensorflow, so that an executor without such models never pays for them.
"""

from __future__ import annotations

from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class TensorflowBackend:
    """Runs models with TensorFlow on CPUs. States, batches and outputs are those of the torch engine."""

    name = "tensorflow"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in inputs, outputs and the largest batch from a SavedModel's signature. Raises ConfigError."""
        from executor.engine.tensorflow import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model. Raises LoadError with the reason."""
        from executor.engine.tensorflow import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.load(request)
