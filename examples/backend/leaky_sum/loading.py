"""Opens models. The runtime is numpy here, and a model is a JSON file: `{"decay": 1, "datatype": "INT32"}`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from executor.engine.base import Engine, LoadRequest
from executor.engine.sessions import completion
from executor.engine.sessions.checks import checked_call
from executor.engine.sessions.forward import Lent
from executor.engine.sessions.loading import existing, make_engine, refuse_gpu
from executor.engine.sessions.signature import SessionSignature, SessionTensor
from shared.contract.errors import LoadError


class Session:
    """One open model: SUM_NEXT = decay * SUM + INPUT, OUTPUT = SUM_NEXT."""

    def __init__(self, path: Path) -> None:
        try:
            told = json.loads(path.read_text())
            self._decay, datatype = told["decay"], told["datatype"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"failed to load model '{path}': {error!r}") from error

        def tensors(*names: str) -> dict[str, SessionTensor]:
            return {name: SessionTensor(name, datatype, (-1, 1)) for name in names}

        self.signature = SessionSignature(inputs=tensors("INPUT", "SUM"), outputs=tensors("OUTPUT", "SUM_NEXT"))

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[NDArray[Any]]:
        """Runs one batch: arrays by name -> the outputs that are wanted, in that order. What it raises fails the batch,
        and each row is then tried alone. It must not keep or change the inputs: their memory is lent.
        """
        after = (self._decay * inputs["SUM"] + inputs["INPUT"]).astype(inputs["SUM"].dtype)
        return [after.copy() for _ in outputs]


def completed(config_json: str, version_dir: Path) -> str:
    """The configuration with the model's own inputs, outputs and batches. Raises ConfigError."""
    return completion.completed(config_json, lambda config: Session(_path(version_dir, config)).signature)


def load(request: LoadRequest) -> Engine:
    """One instance of a model; its states, batches and checkpoints are the mesh's. Raises LoadError."""
    refuse_gpu(request, "leaky_sum")
    session = Session(_path(request.model_dir / request.version, json.loads(request.config_json)))
    call = checked_call(request.config, session.signature)
    compute = Lent(call, lambda inputs: session.run(inputs, call.outputs))
    return make_engine(request, call, compute, failure="leaky_sum error")


def _path(version_dir: Path, config: Mapping[str, Any]) -> Path:
    return existing(version_dir / (config.get("default_model_filename") or "model.leaky_sum"))
