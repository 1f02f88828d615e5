"""The backend `leaky_sum`. Every executor imports this module at its start, and the libraries with the first model."""

from __future__ import annotations

from pathlib import Path

from executor.engine.base import Engine, LoadRequest


class LeakySumBackend:
    """What `backend: "leaky_sum"` names."""

    name = "leaky_sum"

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in what a configuration leaves out. Raises ConfigError."""
        from leaky_sum import loading  # noqa: PLC0415 - see above

        return loading.completed(config_json, version_dir)

    def load(self, request: LoadRequest) -> Engine:
        """Loads a model. Raises LoadError with the reason."""
        from leaky_sum import loading  # noqa: PLC0415 - see above

        return loading.load(request)
