"""Triton's defaults, filled into the configuration message in place. Filling is repeatable.

Source: triton-spec sections 1.1, 3.1 and 4; Triton core, model_config_utils.cc (GetNormalizedModelConfig,
NormalizeInstanceGroup).
"""

from __future__ import annotations

from executor.configuration.backends import Surroundings, fill_backend
from executor.configuration.dialect import translate_dialect
from executor.configuration.names import KIND, Part
from executor.configuration.rules.ensembles import NEWEST, is_ensemble
from shared.configuration.schema import ConfigMessage

IDLE_DEFAULT_US = 1_000_000
"""Triton's `max_sequence_idle_microseconds` where none is given."""

CPU_COUNT_DEFAULT = {"onnxruntime": 2, "tensorflow": 2}
"""Instances of a CPU group that says no count, where a backend wants more than one."""

CPU_ONLY = frozenset({"openvino", "tensorflow"})
"""Backends that compute on CPUs only: their groups of KIND_AUTO are CPU groups on executors with GPUs too."""


def fill_identity(config: ConfigMessage, directory: str) -> None:
    """What must be known before version directories are looked at: the name and the version policy."""
    config.name = config.name or directory
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1


def normalise(config: ConfigMessage, around: Surroundings) -> list[str]:
    """Fills every default, the dialect's translation first; returns what the operator should know.

    raises  ConfigError when no installed backend fits, or when the dialect contradicts itself
    """
    if is_ensemble(config):
        # Every other default is about running a model, and no executor runs an ensemble.
        for step in config.ensemble_scheduling.step:
            step.model_version = step.model_version or NEWEST
        # Shown for every ensemble, as by Triton. Whether it is true, gateways find out.
        config.model_transaction_policy.SetInParent()
        return []
    notes = fill_backend(config, around)
    notes += translate_dialect(config)
    _fill_batching(config)
    notes += _fill_instance_groups(config, around.gpu_count)
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
    if sequence.HasField("oldest") and not sequence.oldest.preferred_batch_size:
        sequence.oldest.preferred_batch_size.extend(preferred)


def _fill_instance_groups(config: ConfigMessage, gpu_count: int) -> list[str]:
    """Name, kind, count and GPUs of each group. A group of our own is called like the model, as Triton does."""
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    notes: list[str] = []
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == KIND["KIND_AUTO"]:
            notes += _resolve_kind(group, 0 if config.backend in CPU_ONLY else gpu_count)
        if group.count < 1:
            group.count = CPU_COUNT_DEFAULT.get(config.backend, 1) if group.kind == KIND["KIND_CPU"] else 1
        if group.kind == KIND["KIND_GPU"] and not group.gpus:
            group.gpus.extend(range(gpu_count))
    return notes


def _resolve_kind(group: Part, gpu_count: int) -> list[str]:
    """KIND_AUTO is on the GPUs if all that it names are there.

    If not, Triton makes a CPU group of it and then refuses that for its `gpus`. They are taken away here, so that one
    repository serves executors with and without GPUs.
    """
    on_gpu = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
    group.kind = KIND["KIND_GPU" if on_gpu else "KIND_CPU"]
    if on_gpu or not group.gpus:
        return []
    named = ", ".join(str(gpu) for gpu in group.gpus)
    group.ClearField("gpus")
    return [f"instance group {group.name} has kind KIND_AUTO, and gpus {named} are not all here: it runs on the CPU"]
