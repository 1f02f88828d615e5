"""What the mesh does with each field of a configuration: serves it, says that it has no effect, or refuses the model.

Every field of the schema stands in exactly one of the three tables, itself or by what it lies in (a test walks the
descriptor), so that no field is ever ignored in silence. To serve something new, move its line.
"""

from __future__ import annotations

from google.protobuf.message import Message

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

SERVED: frozenset[str] = frozenset(
    {
        "name",
        "platform",
        "backend",
        "version_policy",
        "max_batch_size",
        "default_model_filename",
        "metric_tags",
        "model_metrics",
        "parameters",
        "input.name",
        "input.data_type",
        "input.dims",
        "input.reshape",
        "input.allow_ragged_batch",
        "input.optional",
        "input.is_shape_tensor",  # refused by validation, with Triton's message
        "input.is_non_linear_format_io",  # refused by validation, with Triton's message
        "output.name",
        "output.data_type",
        "output.dims",
        "output.reshape",
        "output.label_filename",
        "output.is_shape_tensor",  # refused by validation, with Triton's message
        "output.is_non_linear_format_io",  # refused by validation, with Triton's message
        "batch_input",
        "batch_output",
        "dynamic_batching",
        "sequence_batching.direct",
        "sequence_batching.oldest",
        "sequence_batching.max_sequence_idle_microseconds",
        "sequence_batching.control_input",
        "sequence_batching.iterative_sequence",
        "sequence_batching.state.input_name",
        "sequence_batching.state.output_name",
        "sequence_batching.state.data_type",
        "sequence_batching.state.dims",
        "sequence_batching.state.initial_state",
        "sequence_batching.state.use_same_buffer_for_input_output",
        "sequence_batching.state.name",
        "sequence_batching.reusable_batch",
        "sequence_batching.default_batch_size",
        "sequence_batching.timeout_action",
        "instance_group.name",
        "instance_group.kind",
        "instance_group.count",
        "instance_group.gpus",
        "instance_group.profile",  # refused by validation, with Triton's message
        "model_transaction_policy.stateful_model_policy",
        "model_warmup",
        # Buffers are pinned where torch finds it useful; results are the same either way, and Triton fills these in.
        "optimization.input_pinned_memory",
        "optimization.output_pinned_memory",
        "response_cache.enable",
    }
)

NOTED: dict[str, str] = {
    "input.format": "it only describes the tensor",
    "optimization.graph": "the mesh does not rewrite graphs",
    "optimization.priority": "the mesh has no device priorities",
    "optimization.cuda": "the mesh does not capture CUDA graphs",
    "optimization.execution_accelerators": "the mesh has no execution accelerators",
    "optimization.gather_kernel_buffer_threshold": "the mesh has no gather kernel",
    "optimization.eager_batching": "the next batch is always prepared while one runs",
    "instance_group.rate_limiter": "the mesh has no rate limiter, as Triton by default",
    "instance_group.passive": "every instance takes requests",
    "instance_group.host_policy": "the mesh has no host policies",
}
"""Fields without effect here, and why a model may still be served without it."""

REFUSED: dict[str, str] = {
    "runtime": "a backend has one runtime",
    "ensemble_scheduling": "the mesh does not serve ensembles",
    "sequence_batching.state.use_growable_memory": "the mesh keeps no growable state buffers",
    "instance_group.secondary_devices": "the mesh has no secondary devices",
    "cc_model_filenames": "the mesh does not choose model files by compute capability",
    "model_operations": "the mesh loads no custom operation libraries",
    "model_transaction_policy.decoupled": "the mesh does not serve decoupled models",
    "model_repository_agents": "the mesh has no repository agents",
}
"""Fields without which the model would answer wrongly, and why they cannot be honoured."""


WHOLE_MODELS = ("ensemble_scheduling", "model_transaction_policy.decoupled")
"""Those of the refused fields that make another kind of model: refused before anything of it is looked at or run."""


def refuse_other_kinds(config: ConfigMessage) -> None:
    """Refuses ensembles and decoupled models by name. Raises ConfigError."""
    for path in WHOLE_MODELS:
        part = config
        *parents, last = path.split(".")
        for name in parents:
            part = getattr(part, name)
        if any(field.name == last for field, _ in part.ListFields()):
            raise _refusal(config.name, path)


def review_fields(config: ConfigMessage) -> list[str]:
    """A note for each field that is set and has no effect.

    raises  ConfigError for the first field that cannot be honoured
    """
    notes: list[str] = []
    _review(config, "", config.name, notes)
    return list(dict.fromkeys(notes))


def _review(message: Message, prefix: str, model: str, notes: list[str]) -> None:
    for field, value in message.ListFields():
        path = prefix + field.name
        if path in REFUSED:
            raise _refusal(model, path)
        if path in NOTED:
            notes.append(f"'{path}' has no effect: {NOTED[path]}")
        elif path not in SERVED:
            for element in value if field.is_repeated else (value,):
                _review(element, f"{path}.", model, notes)


def _refusal(model: str, path: str) -> ConfigError:
    return ConfigError(f"model '{model}' sets '{path}', which is not supported: {REFUSED[path]}")
