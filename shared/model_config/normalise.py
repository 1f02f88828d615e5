"""Triton's defaults, filled into the configuration message in place. Filling is repeatable.

Source: triton-spec sections 1.1, 3.1 and 4; Triton core, model_config_utils.cc (GetNormalizedModelConfig,
NormalizeInstanceGroup).
"""

from __future__ import annotations

from shared.model_config.backends import Surroundings, fill_backend
from shared.model_config.dialect import translate_dialect
from shared.model_config.schema import POOL, ConfigMessage

IDLE_DEFAULT_US = 1_000_000
"""Triton's `max_sequence_idle_microseconds` where none is given."""

KIND = {
    name: value.number
    for name, value in POOL.FindEnumTypeByName("inference.ModelInstanceGroup.Kind").values_by_name.items()
}


def fill_identity(config: ConfigMessage, directory: str) -> None:
    """What must be known before version directories are looked at: the name and the version policy."""
    config.name = config.name or directory
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1


def normalise(config: ConfigMessage, around: Surroundings) -> list[str]:
    """Fills every default, the dialect's translation first; returns what the operator should know.

    raises  ConfigError when no installed backend fits, or when the dialect contradicts itself
    """
    notes = fill_backend(config, around)
    notes += translate_dialect(config)
    _fill_batching(config)
    _fill_instance_groups(config, around.gpu_count)
    config.optimization.input_pinned_memory.enable |= not config.optimization.HasField("input_pinned_memory")
    config.optimization.output_pinned_memory.enable |= not config.optimization.HasField("output_pinned_memory")
    return notes


def _fill_batching(config: ConfigMessage) -> None:
    preferred = [config.max_batch_size] if config.max_batch_size > 0 else []
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend(preferred)
    if not config.HasField("sequence_batching"):
        return
    sequence = config.sequence_batching
    sequence.max_sequence_idle_microseconds = sequence.max_sequence_idle_microseconds or IDLE_DEFAULT_US
    if sequence.WhichOneof("strategy_choice") is None:
        sequence.direct.SetInParent()
    if sequence.HasField("oldest") and not sequence.oldest.preferred_batch_size:
        sequence.oldest.preferred_batch_size.extend(preferred)


def _fill_instance_groups(config: ConfigMessage, gpu_count: int) -> None:
    if not config.instance_group:
        config.instance_group.add()
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        if group.kind == KIND["KIND_AUTO"]:
            on_gpu = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
            group.kind = KIND["KIND_GPU" if on_gpu else "KIND_CPU"]
            if not on_gpu:
                group.ClearField("gpus")
        if group.kind == KIND["KIND_GPU"] and not group.gpus:
            group.gpus.extend(range(gpu_count))
