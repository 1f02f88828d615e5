"""Rules of instance groups, with Triton's messages.

Source: triton-spec section 4, "instance_group"; Triton core, model_config_utils.cc (ValidateInstanceGroup).
"""

from __future__ import annotations

from executor.configuration.names import KIND, Part
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.limits import INSTANCES_MAX

MINIMUM_COMPUTE_CAPABILITY = "6.000000"
"""Triton's default, as it prints it. The mesh itself leaves it to torch what a GPU must be able to do."""


def check_instance_groups(config: ConfigMessage, *, dialect: bool, gpu_count: int) -> list[str]:
    """Checks kinds and GPUs of normalised groups; returns notes on odd but allowed values.

    dialect    allows `gpus` with KIND_CPU
    gpu_count  GPUs of this executor
    raises     ConfigError for the first broken rule
    """
    notes: list[str] = []
    for group in config.instance_group:
        prefix = f"instance group {group.name} of model {config.name}"
        if group.kind == KIND["KIND_CPU"] and group.gpus:
            if not dialect:
                raise ConfigError(f"{prefix} has kind KIND_CPU but specifies one or more GPUs")
            notes.append(f"instance group {group.name} has kind KIND_CPU: its gpus have no effect")
        elif group.kind == KIND["KIND_GPU"]:
            _check_gpus(prefix, group, gpu_count)
        elif group.kind != KIND["KIND_CPU"]:
            if group.kind != KIND["KIND_MODEL"]:
                raise ConfigError(f"{prefix} has unexpected kind {group.kind}")
            if group.gpus:
                raise ConfigError(f"{prefix} has kind KIND_MODEL but specifies one or more GPUs")
            raise ConfigError(f"{prefix} has kind KIND_MODEL, which is not supported: say KIND_CPU or KIND_GPU")
        if group.profile:
            # The space that is missing before "specifies" is missing in Triton too.
            raise ConfigError(
                f"{prefix} and platform {config.platform}specifies profile field which is only supported for TensorRT "
                "models"
            )
    count = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    if count > INSTANCES_MAX:
        raise ConfigError(f"model '{config.name}' has {count} instances, more than {INSTANCES_MAX} in one executor")
    return notes


def _check_gpus(prefix: str, group: Part, gpu_count: int) -> None:
    if not group.gpus:
        raise ConfigError(f"{prefix} has kind KIND_GPU but no GPUs are available: KIND_CPU needs none")
    for gpu in group.gpus:
        if not 0 <= gpu < gpu_count:
            available = ", ".join(str(index) for index in range(gpu_count)) or "none"
            raise ConfigError(
                f"{prefix} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                f"CUDA compute compatibility of {MINIMUM_COMPUTE_CAPABILITY} are: {available}"
            )
