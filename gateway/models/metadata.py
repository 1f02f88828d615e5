"""What the gateway says about itself and about models, for both protocols. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from shared.contract.messages import ModelRecord, RepositoryEntry
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.statistics.tally import DURATIONS, ModelStatistics

EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "sequence(step_numbers)",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Protocol extensions that every gateway serves, in Triton's order."""


def extensions_of(*, shared_memory: bool) -> Sequence[str]:
    """The extensions of one gateway. shared_memory: it takes regions of system shared memory."""
    at = EXTENSIONS.index("binary_tensor_data")
    return (*EXTENSIONS[:at], "system_shared_memory", *EXTENSIONS[at:]) if shared_memory else EXTENSIONS


Document = dict[str, Any]
"""An object of the protocols, by field: HTTP writes it as JSON, gRPC as the message with these fields."""


def model_metadata(record: ModelRecord, versions: Sequence[str]) -> Document:
    """Inputs and outputs as clients see them. versions: READY ones."""
    config = record.config
    return {
        "name": config.name,
        "versions": versions,
        "platform": config.platform or config.backend,
        "inputs": [tensor_metadata(config, spec) for spec in config.inputs],
        "outputs": [tensor_metadata(config, spec) for spec in config.outputs],
    }


def tensor_metadata(config: ModelConfig, spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.datatype, "shape": metadata_shape(config, spec)}


def metadata_shape(config: ModelConfig, spec: TensorSpec) -> tuple[int, ...]:
    """The shape of an input or output. It begins with -1 for the batch dimension, if the model has one."""
    return (-1, *spec.dims) if config.max_batch_size > 0 else spec.dims


def index_line(entry: RepositoryEntry) -> Document:
    """A line of the repository index; a model that was never loaded has only its name."""
    line = {"name": entry.model, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {key: value for key, value in line.items() if value}


def statistics_document(statistics: ModelStatistics) -> Document:
    """One version's statistics (triton-spec 5.7). Only decoupled models have `response_stats`."""
    return {
        "name": statistics.name,
        "version": statistics.version,
        "last_inference": statistics.last_inference,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {name: asdict(statistics.durations[name]) for name in DURATIONS},
        "response_stats": {
            place: {name: asdict(duration) for name, duration in of_place.items()}
            for place, of_place in statistics.responses.items()
        },
        "batch_stats": [asdict(batch) for batch in statistics.batches],
        "memory_usage": [msgspec.structs.asdict(use) for use in statistics.memory_usage],
    }
