"""What the mesh does with each field of a configuration: serves it, says that it has no effect, or refuses the model.

Every field of the schema stands in exactly one of the three tables, itself or as a part of a listed field (a test walks
the descriptor), so that no field is ever ignored silently. To serve another field, move its line.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import Message

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError


class ServedField(NamedTuple):
    """A field that has an effect here.

    meaning  what it means, in one or two sentences
    default  what holds where it is not given, as in Triton; "" where it must be given
    """

    meaning: str
    default: str = ""


_TENSOR_FIELDS: dict[str, ServedField] = {
    "name": ServedField("Name of the tensor."),
    "data_type": ServedField("Type of its elements, for instance `TYPE_FP32`."),
    "dims": ServedField("Its shape without the batch dimension; -1 for a size that varies."),
    "reshape.shape": ServedField("The shape that the model itself wants, without the batch dimension.", "`dims`"),
    "is_shape_tensor": ServedField("Refused with Triton's message: only TensorRT has shape tensors.", "false"),
    "is_non_linear_format_io": ServedField("Refused with Triton's message: only TensorRT has such formats.", "false"),
}

SERVED: dict[str, ServedField] = {
    "name": ServedField("Name of the model; it must be the directory's.", "the directory's name"),
    "platform": ServedField("Triton's older way to name a backend, for instance `pytorch_libtorch`.", "the backend's"),
    "backend": ServedField(
        "Name of an installed [backend](../guides/backends.md).",
        "told by `platform`, or by the files in the version directory",
    ),
    "version_policy.latest.num_versions": ServedField(
        "Serve so many of the newest versions.", "1, where no policy is chosen"
    ),
    "version_policy.all": ServedField("Serve every version.", "not chosen"),
    "version_policy.specific.versions": ServedField("Serve these versions.", "not chosen"),
    "max_batch_size": ServedField("Rows that one execution takes at most. 0: tensors have no batch dimension.", "0"),
    "default_model_filename": ServedField(
        "The model's file in the version directory.", "that of the backend which is there, for instance `model.pt`"
    ),
    "metric_tags": ServedField(
        "Further labels of the model's metrics, by name; each label begins with an underscore.", "none"
    ),
    "model_metrics.metric_control.metric_identifier.family": ServedField("Histogram whose buckets are chosen."),
    "model_metrics.metric_control.histogram_options.buckets": ServedField(
        "Upper bounds of its buckets, rising. A histogram that is not named has 100, 500, 2000 and 5000 ms."
    ),
    "parameters": ServedField("Texts by name. The table of parameters says which ones the mesh reads.", "none"),
    **{f"input.{name}": served for name, served in _TENSOR_FIELDS.items()},
    "input.allow_ragged_batch": ServedField("Rows of different shapes may share a batch.", "false"),
    "input.optional": ServedField("A request may leave the tensor out.", "false"),
    **{f"output.{name}": served for name, served in _TENSOR_FIELDS.items()},
    "output.label_filename": ServedField("File with the names of classes, for the classification extension.", "none"),
    "batch_input.kind": ServedField("What the tensor tells of the batch's rows, for instance `BATCH_ELEMENT_COUNT`."),
    "batch_input.target_name": ServedField("Tensors of the model that get the value."),
    "batch_input.data_type": ServedField("`TYPE_INT32` or `TYPE_FP32`."),
    "batch_input.source_input": ServedField("The input whose rows are described."),
    "batch_output.target_name": ServedField("Outputs that come for the whole batch and are cut into rows."),
    "batch_output.kind": ServedField("Always `BATCH_SCATTER_WITH_INPUT_SHAPE`.", "`BATCH_SCATTER_WITH_INPUT_SHAPE`"),
    "batch_output.source_input": ServedField("The input whose shapes say how the outputs are cut."),
    "dynamic_batching.preferred_batch_size": ServedField(
        "Sizes at which a batch is run at once, without waiting for more requests.", "`max_batch_size`"
    ),
    "dynamic_batching.max_queue_delay_microseconds": ServedField(
        "How long a request may wait for others to share its batch.", "0"
    ),
    "dynamic_batching.preserve_ordering": ServedField("Answers leave in the order in which requests arrived.", "false"),
    "dynamic_batching.priority_levels": ServedField(
        "Number of priority levels; level 1 is served first. 0: none.", "0"
    ),
    "dynamic_batching.default_priority_level": ServedField(
        "Level of requests that name none.", "none; required with levels"
    ),
    "dynamic_batching.default_queue_policy.timeout_action": ServedField(
        "What becomes of a request that waits too long. `REJECT`: it fails. `DELAY`: it runs after the punctual ones.",
        "`REJECT`",
    ),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": ServedField(
        "How long a request may wait. 0: for ever.", "0"
    ),
    "dynamic_batching.default_queue_policy.allow_timeout_override": ServedField(
        "A request may lower that time by its own `timeout`.", "false"
    ),
    "dynamic_batching.default_queue_policy.max_queue_size": ServedField(
        "Requests that may wait; further ones are refused. 0: as many as `--backlog-max` allows.", "0"
    ),
    "dynamic_batching.priority_queue_policy": ServedField(
        "Queue policies by level, each with the fields of `default_queue_policy`.", "`default_queue_policy`"
    ),
    "dynamic_batching.default_batch_size": ServedField("Dialect: one more preferred size.", "none"),
    "dynamic_batching.timeout_action": ServedField(
        "Dialect: `timeout_action` of every queue policy. `TIMEOUT_REJECT` means `REJECT`, `TIMEOUT_COMPLETE` means "
        "`DELAY`. With either, a request's own `timeout` counts. Beside `sequence_batching`: its `timeout_action`.",
        "none",
    ),
    "sequence_batching.direct.max_queue_delay_microseconds": ServedField(
        "How long a step may wait for others to share its batch.", "0"
    ),
    "sequence_batching.direct.minimum_slot_utilization": ServedField(
        "Share of the batch's rows (0 to 1) that must have a step before a batch runs within that time.", "0"
    ),
    "sequence_batching.oldest.max_candidate_sequences": ServedField(
        "Slots of one instance. It has more where the mesh holds a state of a fixed size, and more fit into "
        "`--state-bytes-max` (parameter `virtual_slots`).",
        "0: `max_batch_size`, at least 1",
    ),
    "sequence_batching.oldest.preferred_batch_size": ServedField(
        "Sizes at which a batch is run at once, without waiting for more steps.", "`max_batch_size`"
    ),
    "sequence_batching.oldest.max_queue_delay_microseconds": ServedField(
        "How long a step may wait for others to share its batch.", "0"
    ),
    "sequence_batching.oldest.preserve_ordering": ServedField(
        "Answers leave in the order in which steps arrived.", "false"
    ),
    "sequence_batching.max_sequence_idle_microseconds": ServedField(
        "A sequence without a step for so long expires.", "1000000"
    ),
    "sequence_batching.control_input.name": ServedField("Tensor that the batcher makes; clients do not send it."),
    "sequence_batching.control_input.control.kind": ServedField(
        "What it tells the model: `CONTROL_SEQUENCE_START`, `_READY`, `_END` or `_CORRID`.", "`CONTROL_SEQUENCE_START`"
    ),
    "sequence_batching.control_input.control.int32_false_true": ServedField("Its two values, as INT32.", "none"),
    "sequence_batching.control_input.control.fp32_false_true": ServedField("Its two values, as FP32.", "none"),
    "sequence_batching.control_input.control.bool_false_true": ServedField("Its two values, as BOOL.", "none"),
    "sequence_batching.control_input.control.data_type": ServedField(
        "Type of the tensor with the correlation id: an integer type or `TYPE_STRING`.", "none; required with `_CORRID`"
    ),
    "sequence_batching.iterative_sequence": ServedField(
        "A request may take several passes of the model, until the model says that it is done.", "false"
    ),
    "sequence_batching.state.input_name": ServedField("Tensor by which the model gets the state."),
    "sequence_batching.state.output_name": ServedField("Tensor by which it gives the next state."),
    "sequence_batching.state.data_type": ServedField("Type of its elements."),
    "sequence_batching.state.dims": ServedField("Its shape without the batch dimension; -1 for a size that varies."),
    "sequence_batching.state.initial_state.name": ServedField("Name of the initial state."),
    "sequence_batching.state.initial_state.data_type": ServedField("The state's type."),
    "sequence_batching.state.initial_state.dims": ServedField("The state's shape, without -1."),
    "sequence_batching.state.initial_state.zero_data": ServedField(
        "The state begins with zeros.", "this or `data_file` is required"
    ),
    "sequence_batching.state.initial_state.data_file": ServedField(
        "File under `initial_state/` in the model's directory with which the state begins.",
        "this or `zero_data` is required",
    ),
    "sequence_batching.state.use_same_buffer_for_input_output": ServedField(
        "What the model writes into the input is the next state, where it returns none.", "false"
    ),
    "sequence_batching.state.use_growable_memory": ServedField(
        "The state grows along its dimension of -1, or the first one: a checkpoint writes what was added. Needs the "
        "field before, as in Triton; served on CPU too. See [states that grow](../guides/growing-states.md).",
        "false",
    ),
    "sequence_batching.state.name": ServedField("Dialect: one tensor, in and out.", "none"),
    "sequence_batching.reusable_batch.max_size": ServedField("Dialect: `oldest.max_candidate_sequences`.", "0"),
    "sequence_batching.reusable_batch.candidate_batch_size": ServedField(
        "Dialect: `oldest.preferred_batch_size`.", "none"
    ),
    "sequence_batching.default_batch_size": ServedField(
        "Dialect: one more preferred size of the oldest strategy.", "none"
    ),
    "sequence_batching.timeout_action": ServedField(
        "Dialect: what becomes of a step that waits for a slot longer than its own `timeout`. `TIMEOUT_REJECT`: it "
        "fails with its sequence. `TIMEOUT_COMPLETE`: it is served late.",
        "`TIMEOUT_REJECT`",
    ),
    "ensemble_scheduling.step.model_name": ServedField("Model of the step; it may be an ensemble itself."),
    "ensemble_scheduling.step.model_version": ServedField("Its version. -1: the newest.", "-1"),
    "ensemble_scheduling.step.input_map": ServedField("Input of the step's model -> tensor of the ensemble."),
    "ensemble_scheduling.step.output_map": ServedField("Output of the step's model -> tensor of the ensemble."),
    "ensemble_scheduling.max_inflight_requests": ServedField(
        "Answers of a decoupled step that one request has on their way through the steps behind it; 0: at most 64.", "0"
    ),
    "instance_group.name": ServedField("Name of the group.", "the model's name and the group's number"),
    "instance_group.kind": ServedField(
        "`KIND_CPU`, `KIND_GPU` or `KIND_AUTO`.", "`KIND_AUTO`: GPUs where there are any"
    ),
    "instance_group.count": ServedField("Instances in each executor, with `KIND_GPU` for each GPU.", "1"),
    "instance_group.gpus": ServedField("Indexes of GPUs.", "with `KIND_GPU`: all"),
    "instance_group.profile": ServedField("Refused with Triton's message: only TensorRT has profiles.", "none"),
    "model_transaction_policy.decoupled": ServedField(
        "A request has any number of answers; clients get them over gRPC streams.", "false"
    ),
    "model_transaction_policy.stateful_model_policy.timeout_action": ServedField(
        "Dialect: the policy alone makes the model a sequence model of the oldest strategy, idle after ten minutes. "
        "`DESCRIBE`: the state of a sequence that expires is described in the log.",
        "none",
    ),
    "model_warmup.name": ServedField("Name of the sample, for messages.", "none"),
    "model_warmup.batch_size": ServedField("Requests in the sample's batch. 0: the sample is skipped.", "0"),
    "model_warmup.inputs": ServedField(
        "Tensors by name, each with `data_type`, `dims` and one of `zero_data`, `random_data` and `input_data_file` (a "
        "file under `warmup/` in the model's directory).",
        "none",
    ),
    "model_warmup.count": ServedField("How often each instance runs the sample before it is ready.", "1"),
    # Buffers are pinned where torch finds it useful; results are the same either way, and Triton fills these in.
    "optimization.input_pinned_memory.enable": ServedField("Buffers of inputs may be pinned.", "true"),
    "optimization.output_pinned_memory.enable": ServedField("Buffers of outputs may be pinned.", "true"),
    "optimization.graph.level": ServedField(
        "How far an `onnxruntime` model is optimized: -1 basic, 1 extended, 2 not at all, 0 everything. Of a "
        "`tensorflow` model: XLA is off with -1, on with 1 and 2. Other backends do not rewrite graphs.",
        "0",
    ),
    "response_cache.enable": ServedField(
        "Equal requests are answered from the response cache, where gateways have one (`--cache-config`). Not for "
        "sequence models.",
        "false",
    ),
}
"""Fields that have an effect, by path."""

NOTED: dict[str, str] = {
    "input.format": "it only describes the tensor",
    "optimization.priority": "the mesh has no device priorities",
    "optimization.cuda": "the mesh does not capture CUDA graphs",
    "optimization.execution_accelerators": "the mesh has no execution accelerators",
    "optimization.gather_kernel_buffer_threshold": "the mesh has no gather kernel",
    "optimization.eager_batching": "a batch is always formed when an instance is free, as in Triton by default",
    "instance_group.rate_limiter": "the mesh has no rate limiter, as Triton by default",
    "instance_group.passive": "every instance takes requests",
    "instance_group.host_policy": "the mesh has no host policies",
}
"""Fields without effect here, and why a model may still be served without it."""

REFUSED: dict[str, str] = {
    "runtime": "a backend has one runtime",
    "ensemble_scheduling.step.model_namespace": "a mesh has one namespace of models",
    "instance_group.secondary_devices": "the mesh has no secondary devices",
    "cc_model_filenames": "the mesh does not choose model files by compute capability",
    "model_operations": "the mesh loads no custom operation libraries",
    "model_repository_agents": "the mesh has no repository agents",
}
"""Fields without which the model would answer wrongly, and why they cannot be honoured."""


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
            raise ConfigError(f"model '{model}' sets '{path}', which is not supported: {REFUSED[path]}")
        if path in NOTED:
            notes.append(f"'{path}' has no effect: {NOTED[path]}")
        elif path not in SERVED:
            for element in value if field.is_repeated else (value,):
                _review(element, f"{path}.", model, notes)
