"""The built-in backends that need packages. All keep their states in torch tensors.

This module imports neither torch nor another runtime: a backend's code comes in with the first model that needs it, so
that an executor without such models never pays for it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class RuntimeBackend:
    """Runs models with a runtime from a package.

    modules  of the packages
    loading  module with the backend's functions `completed` and `load`
    """

    def __init__(self, name: str, modules: tuple[str, ...], loading: str) -> None:
        self.name = name
        self._modules = modules
        self._loading = loading

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(module) is not None for module in self._modules)

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in from the model what the configuration leaves out. Raises ConfigError and LoadError."""
        return importlib.import_module(self._loading).completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model onto its device. Raises LoadError with the reason."""
        return importlib.import_module(self._loading).load(request)


PYTORCH = RuntimeBackend("pytorch", ("torch",), "executor.engine.pytorch.loading")
"""TorchScript (`model.pt`) and exported programs (`model.pt2`)."""
RUNTIMES = (
    PYTORCH,
    RuntimeBackend("onnxruntime", ("torch", "onnxruntime"), "executor.engine.onnx.loading"),
    RuntimeBackend("openvino", ("torch", "openvino"), "executor.engine.openvino.loading"),
    RuntimeBackend("tensorflow", ("torch", "tensorflow"), "executor.engine.tensorflow.loading"),
)
