"""A model's configuration, with defaults filled in and every rule checked.

These values travel through Redis as JSON, from the executor that loaded the model to gateways and schedulers, which
need no model repository and no protobuf. They hold what the mesh needs for its decisions. Triton's own JSON of the
whole configuration (for the config endpoint) travels beside them in `shared.contract.messages.ModelRecord`.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

import msgspec

from shared.contract.limits import IDLE_MS_MAX, RETRY_REPLIES, RETRY_REPLY_BYTES


class ControlKind(StrEnum):
    """What a control tensor tells the model (triton-spec 1.2)."""

    START = "START"
    READY = "READY"
    END = "END"
    CORRID = "CORRID"


class TensorSpec(msgspec.Struct, frozen=True):
    """One declared input or output.

    datatype  wire name: BOOL UINT8..UINT64 INT8..INT64 FP16 BF16 FP32 FP64 BYTES
    dims      without the batch dimension; -1 is variable
    reshape   the shape that the model itself wants, without batch dimension; None if it equals `dims`
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    allow_ragged_batch: bool = False
    reshape: tuple[int, ...] | None = None
    label_filename: str = ""


class ControlSpec(msgspec.Struct, frozen=True):
    """A tensor that the batcher makes; the client must not send it.

    datatype    wire name of the tensor: INT32, FP32 or BOOL for START/READY/END; an integer type or BYTES for CORRID
    false_true  the two values for START/READY/END; None for CORRID
    """

    name: str
    kind: ControlKind
    datatype: str
    false_true: tuple[float, float] | None = None


class StateSpec(msgspec.Struct, frozen=True):
    """One implicit state. Input and output are paired by these names, never by order.

    dims          without the batch dimension; -1 is variable
    initial_file  file under `<model>/initial_state/` with the first content; "" means zeros
    same_buffer   input and output are one buffer (`use_same_buffer_for_input_output`): if the model returns no output,
                  the next state is what it wrote into its input
    growable      it grows along its variable dimension (`use_growable_memory`): a checkpoint writes what was added
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...] | None = None
    initial_file: str = ""
    same_buffer: bool = False
    growable: bool = False

    @property
    def growth_axis(self) -> int | None:
        """The dimension along which it grows, without the batch dimension; None if it lies in one piece."""
        grows = self.growable and self.datatype != "BYTES" and self.dims.count(-1) == 1
        return self.dims.index(-1) if grows else None


class TimeoutAction(StrEnum):
    """What becomes of a request that waited too long: it is refused, or runs after the punctual ones."""

    REJECT = "REJECT"
    DELAY = "DELAY"


class Direct(msgspec.Struct, frozen=True, tag="direct"):
    """In Triton a sequence keeps one row of the batch for its whole life (triton-spec 1.4). Here it does so only where
    a slot is a row: where an instance has no more than the `configured_slots`.
    """

    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0


class Oldest(msgspec.Struct, frozen=True, tag="oldest"):
    """Candidates with a ready step form batches, oldest step first (triton-spec 1.5)."""

    max_candidate_sequences: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


class FixedShape(StrEnum):
    """Parameter `fixed_shape`: whether a sequence's results may depend, in any bit, on the other rows of its batches.

    OFF     they may
    PADDED  they may not: every batch has the same number of rows. If the load finds that this does not keep each row's
            bits, as ROWS
    ROWS    they may not: every row runs alone
    """

    OFF = "false"
    PADDED = "true"
    ROWS = "rows"


class SequenceBatching(msgspec.Struct, frozen=True, dict=True):
    """How a stateful model's sequences are scheduled.

    idle_us             a sequence expires after so long with nothing queued
    implicit_start      dialect: a first request without START begins a sequence (docs/triton/dialect.md)
    describe_on_expiry  dialect (`timeout_action: DESCRIBE`): log a description of the state when a sequence expires
    timeout_action      what a request's `timeout` does to its sequence in the backlog. Triton knows REJECT only; the
                        dialect's TIMEOUT_COMPLETE is DELAY: the steps are served late instead
    """

    strategy: Direct | Oldest
    idle_us: int
    controls: tuple[ControlSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False
    implicit_start: bool = False
    describe_on_expiry: bool = False
    timeout_action: TimeoutAction = TimeoutAction.REJECT

    @cached_property
    def correlation_id(self) -> ControlSpec | None:
        """The control tensor that gets the correlation id, which is asked for with each step; None if there is none."""
        return next((control for control in self.controls if control.kind is ControlKind.CORRID), None)


class SequenceRecovery(StrEnum):
    """What becomes of sequences whose state the model keeps itself, when their executor is lost (parameter
    `sequence_recovery`).

    NONE     they are lost too
    REPLAY   the mesh keeps the steps since START, and another executor runs them again
    METHODS  the model's methods `checkpoint` and `restore` carry the state: the default of a model that has them
    """

    NONE = "none"
    REPLAY = "replay"
    METHODS = "methods"


class QueuePolicy(msgspec.Struct, frozen=True):
    """One priority level's rules (triton-spec 3.1); zeros mean no limit."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    """How stateless requests are put together (triton-spec 3).

    own_timeouts  dialect (`timeout_action`): a request's own timeout counts in every level, whatever its policy says
    """

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: dict[int, QueuePolicy] = {}
    own_timeouts: bool = False


class BatchInputKind(StrEnum):
    """What a batch input tells the model about the rows of its batch (triton-spec 4)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


class BatchInput(msgspec.Struct, frozen=True):
    """Tensors that the batcher makes once per batch. No client sends them, and they are not in `inputs`.

    names     the model's tensors that get the value
    datatype  INT32 or FP32
    source    the input whose rows are described; one of `inputs`
    """

    kind: BatchInputKind
    names: tuple[str, ...]
    datatype: str
    source: str


class BatchOutput(msgspec.Struct, frozen=True):
    """Outputs of the whole batch that are cut by the shapes of an input (BATCH_SCATTER_WITH_INPUT_SHAPE).

    names   the outputs, all of them in `outputs`
    source  the input whose shape gives the shape of each request's part
    """

    names: tuple[str, ...]
    source: str


class WarmupSource(StrEnum):
    """Where a warm-up tensor's content comes from. RANDOM of BYTES is ZERO: elements of length 0."""

    ZERO = "ZERO"
    RANDOM = "RANDOM"
    FILE = "FILE"


class WarmupInput(msgspec.Struct, frozen=True):
    """One tensor of a warm-up request: an input, or a control tensor of a sequence model.

    dims  without the batch dimension, for a control tensor its whole shape; no -1
    file  under `<model>/warmup/`, with source FILE: the leading bytes count, of BYTES all of them
    """

    datatype: str
    dims: tuple[int, ...]
    source: WarmupSource
    file: str = ""


class WarmupSample(msgspec.Struct, frozen=True):
    """A batch that each instance runs `count` times before it is ready. No scheduler sees it.

    batch_size  requests in the batch, each with one row; never 0
    """

    name: str
    batch_size: int
    inputs: dict[str, WarmupInput]
    count: int = 1


class InstanceGroup(msgspec.Struct, frozen=True):
    """Copies of a model inside one executor. kind: CPU or GPU (AUTO is resolved at load)."""

    name: str
    kind: str = "CPU"
    count: int = 1
    gpus: tuple[int, ...] = ()


class EnsembleStep(msgspec.Struct, frozen=True):
    """One step of an ensemble: a request to another model, made of the ensemble's tensors.

    version  of the model; "" leaves the choice to the server
    inputs   the model's input -> tensor of the ensemble
    outputs  the model's output -> tensor of the ensemble
    """

    model: str
    version: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class ModelConfig(msgspec.Struct, frozen=True, dict=True):
    """A model's configuration, complete and valid. Values that are needed with every step are computed once.

    max_batch_size     0: the model has no batch dimension
    response_cache     equal requests may be answered from the cache; never for a sequence model, and without effect for
                       an ensemble
    metric_tags        labels beside model and version on the model's metrics
    histogram_buckets  of `model_metrics`: family of a histogram -> its own bucket bounds
    state_methods      the model keeps its sequences' state itself, and its methods `checkpoint` and `restore` hand it
                       out; found at load
    ensemble           its steps, if the model is an ensemble: no executor runs it, gateways send its steps
    decoupled          a request has any number of answers. Of an ensemble, gateways find it out by its steps
    ensemble_inflight_max
                       of an ensemble: requests to a step that one request has at the same time, where a decoupled step
                       before it gives many answers; 0: the mesh's own bound
    notes              remarks of the loader for the operator (dialect read, values completed)
    """

    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    default_model_filename: str = ""
    sequence_batching: SequenceBatching | None = None
    dynamic_batching: DynamicBatching | None = None
    instance_groups: tuple[InstanceGroup, ...] = ()
    parameters: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    warmup: tuple[WarmupSample, ...] = ()
    response_cache: bool = False
    metric_tags: dict[str, str] = {}
    histogram_buckets: dict[str, tuple[float, ...]] = {}
    state_methods: bool = False
    ensemble: tuple[EnsembleStep, ...] = ()
    decoupled: bool = False
    ensemble_inflight_max: int = 0

    @property
    def instance_count(self) -> int:
        """Instances that each executor runs. The count of a GPU group is per GPU, as in Triton."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.instance_groups) or 1

    @property
    def is_direct(self) -> bool:
        """Whether it is a sequence model of the direct strategy."""
        return self.sequence_batching is not None and isinstance(self.sequence_batching.strategy, Direct)

    @cached_property
    def inputs_by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def outputs_by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.outputs}

    @cached_property
    def configured_slots(self) -> int:
        """Slots of one instance as Triton counts them (triton-spec 1.1): rows of the batch (direct), candidates
        (oldest); 0 for a stateless model. An executor may have more of them, by memory.
        """
        if self.sequence_batching is None:
            return 0
        rows = max(1, self.max_batch_size)
        match self.sequence_batching.strategy:
            case Oldest(max_candidate_sequences=candidates):
                return candidates or rows
            case Direct():
                return rows

    @property
    def checkpoint_interval(self) -> int:
        """Steps between two checkpoints of a sequence (parameter `checkpoint_interval`, default 1)."""
        return int(self.parameters.get("checkpoint_interval", "1"))

    @property
    def instance_process(self) -> bool:
        """Whether each instance of a python model is a process of its own (parameter `instance_process`). By default
        it is if the model has an environment of its own.
        """
        default = "true" if "EXECUTION_ENV_PATH" in self.parameters else "false"
        return self.parameters.get("instance_process", default) == "true"

    @property
    def retry_replies(self) -> int:
        """Replies of a sequence that are kept for retries (parameter `retry_replies`)."""
        return int(self.parameters.get("retry_replies", RETRY_REPLIES))

    @property
    def retry_reply_bytes(self) -> int:
        """Bytes of these replies without the newest one (parameter `retry_reply_bytes`)."""
        return int(self.parameters.get("retry_reply_bytes", RETRY_REPLY_BYTES))

    @cached_property
    def orphan_grace_ms(self) -> int:
        """Idle time left to a sequence whose connection is closed before its END (parameter
        `orphan_grace_microseconds`); 0: its whole idle time.
        """
        return -(-int(self.parameters.get("orphan_grace_microseconds", "0")) // 1000)

    @property
    def idle_ms(self) -> int:
        """How long a sequence may be idle, at most IDLE_MS_MAX; 0 for a model without sequences."""
        if self.sequence_batching is None:
            return 0
        return min(IDLE_MS_MAX, max(1, self.sequence_batching.idle_us // 1000))

    @property
    def shortest_idle_ms(self) -> int:
        """How long a sequence may be idle if its connection is closed meanwhile."""
        return min(self.idle_ms, self.orphan_grace_ms or self.idle_ms)

    @property
    def fixed_shape(self) -> FixedShape:
        """The parameter of a sequence model; OFF for other models."""
        return FixedShape(self.parameters.get("fixed_shape", "false") if self.sequence_batching else "false")

    @cached_property
    def pageable(self) -> bool:
        """Whether a sequence gives up its slot between two steps while other sequences wait (parameter `virtual_slots`,
        default true): only if the mesh holds its state.
        """
        return self.state_in_mesh and self.parameters.get("virtual_slots", "true") == "true"

    @property
    def batch_gathering(self) -> bool:
        """Whether a batch may wait for sequences that are about to come back (parameter `batch_gathering`, default
        on).
        """
        return self.parameters.get("batch_gathering", "on") == "on"

    @property
    def is_stateful(self) -> bool:
        """Whether a request is a step of its client's sequence. To an iterative model it is a sequence of its own."""
        return self.sequence_batching is not None and not self.sequence_batching.iterative

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The declared states of its sequences; empty for a stateless model."""
        return self.sequence_batching.states if self.sequence_batching is not None else ()

    @property
    def controls(self) -> tuple[ControlSpec, ...]:
        """The control tensors of its sequences; empty for a stateless model."""
        return self.sequence_batching.controls if self.sequence_batching is not None else ()

    @property
    def declares_state(self) -> bool:
        """Whether the configuration declares the sequences' state; then it declares all of it."""
        return bool(self.states)

    @property
    def state_in_mesh(self) -> bool:
        """Whether the mesh holds the state of a sequence: the state is declared, or the model hands it out."""
        return self.declares_state or self.state_methods

    @property
    def sequence_recovery(self) -> SequenceRecovery | None:
        """Parameter `sequence_recovery`; None if it is not given: then it is METHODS if the model has them."""
        said = self.parameters.get("sequence_recovery")
        return None if said is None else SequenceRecovery(said)

    @property
    def replays(self) -> bool:
        """Whether a takeover rebuilds a sequence's state by running all of its steps since START again."""
        stateful = self.sequence_batching is not None
        return stateful and not self.state_in_mesh and self.sequence_recovery is SequenceRecovery.REPLAY

    @property
    def sequence_log_steps(self) -> int:
        """Steps since START that are kept for a replay (parameter, default 1000). A sequence with more steps is not
        recoverable any more.
        """
        return int(self.parameters.get("sequence_log_steps", "1000"))

    @property
    def sequence_log_bytes(self) -> int:
        """Bytes of these steps together (parameter, default 16 MiB)."""
        return int(self.parameters.get("sequence_log_bytes", str(16 << 20)))

    @property
    def keeps_journal(self) -> bool:
        """Whether the steps of a sequence since START are kept with their answers (parameter `journal_steps`)."""
        return self.sequence_batching is not None and not self.decoupled and "journal_steps" in self.parameters

    @property
    def journal_steps(self) -> int:
        return int(self.parameters["journal_steps"])

    @property
    def journal_bytes(self) -> int:
        """Bytes of these steps' requests and replies together (parameter, default 16 MiB)."""
        return int(self.parameters.get("journal_bytes", str(16 << 20)))

    @property
    def loss_remedy(self) -> str:
        """Advice how to avoid that another sequence is lost with its executor; "" if nothing can be done."""
        if self.replays:
            return (
                f"{self.sequence_log_steps} steps and {self.sequence_log_bytes} bytes since START are kept to make a "
                "state anew: if the sequence had more, raise the model's parameters sequence_log_steps and "
                "sequence_log_bytes"
            )
        if self.state_in_mesh:
            return ""
        return (
            "to have the mesh keep a state, declare it in the model's configuration, or name a sequence_recovery there"
        )

    @cached_property
    def recoverable(self) -> bool:
        """Whether a sequence can be taken over when its executor is lost."""
        return self.state_in_mesh or self.replays
