"""The backend `onnxruntime`: models in the ONNX format (`model.onnx`).

This module imports neither torch nor onnxruntime, so that an executor without ONNX models never pays for them.
"""

from __future__ import annotations

from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class OnnxBackend:
    """Runs ONNX models with ONNX Runtime. States, batches and outputs are those of the torch engine."""

    name = "onnxruntime"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in inputs, outputs and the largest batch from the model. Raises ConfigError."""
        from executor.engine.onnx import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model onto its device. Raises LoadError with the reason."""
        from executor.engine.onnx import loading  # noqa: PLC0415 - the libraries come in with the first model

        return loading.load(request)
