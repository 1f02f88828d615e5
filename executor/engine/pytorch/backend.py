"""The backend `pytorch`: TorchScript (`model.pt`) and exported programs (`model.pt2`).

This module imports no torch, so that an executor which serves only `python` models never pays for it.
"""

from __future__ import annotations

from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class PytorchBackend:
    """Runs what `torch.jit.save` and `torch.export.save` wrote."""

    name = "pytorch"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in inputs, outputs and states from the model's own signature. Raises ConfigError."""
        from executor.engine.pytorch import completion  # noqa: PLC0415 - torch comes in with the first model that needs it

        return completion.completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model onto its device. Raises LoadError with the reason."""
        from executor.engine.pytorch import loading  # noqa: PLC0415 - torch comes in with the first model that needs it

        return loading.load(request)
