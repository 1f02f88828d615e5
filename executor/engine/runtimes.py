"""The built-in backends that need packages. All keep their states in torch tensors.

This module imports neither torch nor another runtime: a backend's code comes in with the first model that needs it, so
that an executor without such models never pays for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from executor.engine.base import Engine, LoadRequest

Completed = Callable[[str, Path], str]
Load = Callable[[LoadRequest], Engine]


class RuntimeBackend:
    """Runs models with a runtime from a package.

    modules  of the packages
    code     imports the backend's code, and returns what completes a configuration and what loads a model
    """

    def __init__(self, name: str, modules: tuple[str, ...], code: Callable[[], tuple[Completed, Load]]) -> None:
        self.name = name
        self._modules = modules
        self._code = code

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(module) is not None for module in self._modules)

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in from the model what the configuration leaves out. Raises ConfigError and LoadError."""
        completed, _ = self._code()
        return completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model onto its device. Raises LoadError with the reason."""
        _, load = self._code()
        return load(request)


def _pytorch() -> tuple[Completed, Load]:
    from executor.engine.pytorch import completion, loading  # noqa: PLC0415

    return completion.completed, loading.load


def _onnx() -> tuple[Completed, Load]:
    from executor.engine.onnx import loading  # noqa: PLC0415

    return loading.completed, loading.load


def _openvino() -> tuple[Completed, Load]:
    from executor.engine.openvino import loading  # noqa: PLC0415

    return loading.completed, loading.load


def _tensorflow() -> tuple[Completed, Load]:
    from executor.engine.tensorflow import loading  # noqa: PLC0415

    return loading.completed, loading.load


PYTORCH = RuntimeBackend("pytorch", ("torch",), _pytorch)
"""TorchScript (`model.pt`) and exported programs (`model.pt2`)."""
RUNTIMES = (
    PYTORCH,
    RuntimeBackend("onnxruntime", ("torch", "onnxruntime"), _onnx),
    RuntimeBackend("openvino", ("torch", "openvino"), _openvino),
    RuntimeBackend("tensorflow", ("torch", "tensorflow"), _tensorflow),
)
