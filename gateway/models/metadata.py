"""What the gateway says about itself and about models, for both protocols. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contract.model_config import ModelConfig, TensorSpec

SERVER_NAME = "triton"
"""The default server name in the metadata. It is Triton's, because Triton's own examples compare it."""
EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
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
"""Protocol extensions that are served, in Triton's order; shared memory is not among them."""
SHARED_MEMORY_REFUSAL = (
    "shared memory is not supported: client, gateway and executor of a mesh need not be on one machine; send tensor "
    "data in the message"
)


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A declared tensor as clients see it. `shape` begins with -1 for the batch dimension, if the model has one."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def tensor_metadata(config: ModelConfig, spec: TensorSpec) -> TensorMetadata:
    """One input or output of a model."""
    return TensorMetadata(spec.name, spec.datatype, (-1, *spec.dims) if config.max_batch_size > 0 else spec.dims)


def platform_of(config: ModelConfig) -> str:
    """What metadata calls the platform: the configuration's platform, or else its backend."""
    return config.platform or config.backend
