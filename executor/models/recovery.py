"""Whether a model has methods to hand out its sequences' state, which only the loaded model can tell."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from executor.engine.base import Engine, HandsOutState
from shared.contract.errors import LoadError
from shared.contract.model_config import ModelConfig, SequenceRecovery


def with_methods(config: ModelConfig, engines: Iterable[Engine]) -> ModelConfig:
    """The configuration of a version whose engines are loaded, with `state_methods`.

    Raises LoadError if the configuration asks for the methods and the model has none.
    """
    found = all(isinstance(engine, HandsOutState) and engine.hands_out_state for engine in engines)
    return _told(config, found=found)


def of_versions(config: ModelConfig, versions: Iterable[ModelConfig]) -> ModelConfig:
    """The configuration as the mesh is told of it. A gateway does not distinguish versions here, so every version must
    have the methods.
    """
    return _told(config, found=all(version.state_methods for version in versions))


def _told(config: ModelConfig, *, found: bool) -> ModelConfig:
    asked = config.sequence_recovery
    if config.sequence_batching is None or config.declares_state:
        return config
    if found:
        note = "its methods checkpoint and restore carry the state of its sequences"
        if asked is SequenceRecovery.REPLAY:
            note += "; sequence_recovery: replay has no effect"
    elif asked is SequenceRecovery.METHODS:
        raise LoadError(
            f"parameter 'sequence_recovery' of model '{config.name}' asks for its methods checkpoint(correlation_id) "
            "and restore(correlation_id, state), and it does not have them"
        )
    elif config.checkpoint_interval > 1 and config.backend == "python":
        note = "parameter 'checkpoint_interval' has no effect: the model declares no state, and has no methods for it"
    else:
        return config
    return msgspec.structs.replace(config, state_methods=found, notes=(*config.notes, note))
