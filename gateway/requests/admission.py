"""Decides whether a request may enter the mesh, and as what. Pure: request and configuration in, step or error out.

The same rules for both protocols, in the order in which Triton checks them, with its texts (triton-spec 1.2, 1.3, 4).
Tensor bytes are counted, never decoded: for BYTES tensors only the length fields are walked.

Where a message has Triton's id prefix, it is `[request id: <id>] `; an unnamed request's id reads `<id_unknown>`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.models.versions import check_version_text
from shared.contract.batch_shape import ShapeKeys, rows_of
from shared.contract.calls import CallOrigin
from shared.contract.endpoints import Endpoint
from shared.contract.errors import Code, RequestError
from shared.contract.ids import CorrelationId, SequenceId, sequence_id
from shared.contract.limits import CORRELATION_ID_CHARS_MAX
from shared.contract.messages import InferMessage, ModelRecord, StepFlag
from shared.contract.model_config import ModelConfig, TensorSpec, TimeoutAction
from shared.contract.parameters import Parameter
from shared.contract.tensors import ELEMENT_BYTES, Tensor, element_count

UINT64_MAX = (1 << 64) - 1
WIDE_IDS = ("UINT64", "INT64")
"""Types of a CORRID control that can hold the hash of a session's text."""
STRINGS_BYTES_MAX = 1 << 18
"""Bytes of a BYTES tensor that are read in one go: at worst elements without content, 4 bytes each, some 10 ms."""
START, END, IMPLICIT, DURABLE, ALONE, PAGEABLE, TOLD = map(
    int,
    (
        *(StepFlag.START, StepFlag.END, StepFlag.IMPLICIT, StepFlag.DURABLE, StepFlag.ALONE, StepFlag.PAGEABLE),
        StepFlag.TOLD,
    ),
)

BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class EnsemblePart(msgspec.Struct, frozen=True):
    """What makes a step of an ensemble another step than one that a client sends to the same model.

    scope   stands in the sequence's name: sequences of an ensemble's step are not those of clients
    digest  by which the step is recognised when it is sent again; b"" if it cannot be sent again
    """

    scope: str
    digest: bytes


class InferCall(msgspec.Struct, frozen=True):
    """One inference request, as either protocol brings it; nothing is checked yet but the protocol's own form.

    version          "" leaves the choice to the server
    correlation_id   uint64 or string; 0 and "" mean none
    expected_step    request parameter `sequence_step`: the number, since START, that this step must get. A repeated
                     step with the same number is answered with the stored reply.
    timeout_us       0: none
    inputs           raw bytes as they came; `raw` is not yet compared with `shape`
    outputs          names asked for, in the caller's order; empty means all
    parameters       the request's other parameters
    session_id       the `Inference-Session-Id` header or metadata; None when there was none
    trace_headers    the client's `traceparent` and `tracestate`, lower-case names
    string_problems  what `with_strings_read` found wrong with each BYTES input, by name; None before it was called
    part             of a stateful step of an ensemble; None for what a client sent
    origin           of a call that a model made; None for what a client sent
    endpoint         by which way it came
    first_answer     request parameter `sequence_answer`: of a decoupled model's answers, the first one that the caller
                     lacks
    wants_empty_final  of a decoupled model, the caller wants a last answer that has nothing to give
    tenant           on whose behalf it comes (`shared.contract.tenants`); "": it does not say
    wait_info        request parameter `sequence_wait_info`: the caller wants to hear of its wait for a slot
    wait_max_ms      request parameter `sequence_wait_max_ms`: how long the caller waits for a sequence's first slot; 0:
                     it has not said so
    run_info         request parameter `sequence_run_info`: the caller wants to know the name of the sequence's run
    ended_run        request parameter `sequence_close`: the request is no step, but ends the run of this name
    """

    model: str
    version: str = ""
    request_id: str = ""
    correlation_id: CorrelationId = 0
    start: bool = False
    end: bool = False
    expected_step: int | None = None
    priority: int = 0
    timeout_us: int = 0
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = {}
    session_id: str | None = None
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    string_problems: Mapping[str, str] | None = None
    part: EnsemblePart | None = None
    origin: CallOrigin | None = None
    endpoint: Endpoint = Endpoint.MODEL_INFER
    first_answer: int = 1
    wants_empty_final: bool = False
    wait_info: bool = False
    wait_max_ms: int = 0
    tenant: str = ""
    run_info: bool = False
    ended_run: str = ""


class Queueing(msgspec.Struct, frozen=True):
    """How a stateless request waits for its batch (triton-spec 3.1-3.3); zeros mean none.

    level        priority level, lower first; 0 where the model has none
    level_bound  requests that its level may hold
    timeout_us   how long the request may wait
    delays       at the timeout the request goes behind all others of its level, instead of being refused
    rows, shape  the request's part of a batch (`shared.contract.batch_shape`)
    ordered      answers leave in the order of arrival
    """

    level: int = 0
    level_bound: int = 0
    timeout_us: int = 0
    delays: bool = False
    rows: int = 1
    shape: str = ""
    ordered: bool = False


class Admitted(msgspec.Struct, frozen=True):
    """A request that may enter the mesh.

    sequence     None for a stateless model
    flags        of a step (`StepFlag`), as a plain number: combining and asking enum flags costs more than all checks
    session_id   the id that the gateway made, when the request begins a sequence and names none; else None
    queueing     how a stateless request waits; without meaning for a step of a sequence
    timeout_is_ignored
                 the request's timeout does not count while it waits for a slot (dialect: TIMEOUT_COMPLETE)
    """

    message: InferMessage
    sequence: SequenceId | None = None
    flags: int = 0
    session_id: str | None = None
    queueing: Queueing = Queueing()
    timeout_is_ignored: bool = False


def admit(
    call: InferCall,
    record: ModelRecord,
    version: str,
    *,
    arrived_ns: int,
    make_session: Callable[[], int | str],
    forms: KnownForms | None = None,
) -> Admitted:
    """Checks a request against its model.

    version       the version that will serve it
    arrived_ns    wall clock, ns
    make_session  makes a new id for a sequence whose client named none; its decimal or text form is told to the client
    forms         remembers what was checked before; None: everything is checked
    returns       the step, or the stateless request, ready to be submitted
    raises        RequestError with Triton's words
    """
    config = record.config
    if forms is None:
        check_form(call, config)
    else:
        forms.check(call, config)
    if config.sequence_batching is None:
        return _stateless(call, config, version, arrived_ns)
    return _step(call, config, version, arrived_ns, make_session)


def with_id(request_id: str, text: str) -> str:
    """A message with Triton's prefix that names the request."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"


def error_about(call: InferCall, text: str) -> RequestError:
    """The error of a request that Triton names in its text."""
    return RequestError(with_id(call.request_id, text))


def check_correlation_id(correlation_id: CorrelationId) -> None:
    """Refuses ids that no protocol message may carry; both codecs call it while they read parameters."""
    # Triton counts bytes and calls them characters.
    if isinstance(correlation_id, str) and len(correlation_id.encode()) > CORRELATION_ID_CHARS_MAX:
        raise RequestError(
            f"string correlation ID cannot be longer than {CORRELATION_ID_CHARS_MAX} characters", Code.UNSUPPORTED
        )


# -- outputs and inputs, for every model ----------------------------------------------------------------------------

Form = tuple[tuple[str, ...], list[tuple[str, str, tuple[int, ...], int]]]
"""Names of the outputs; name, datatype, shape and bytes of each input. See `form_of`."""


class KnownForms:
    """The form of the last request to each model that passed. A request of the same form passes by one comparison."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[ModelConfig, Form]] = {}

    def check(self, call: InferCall, config: ModelConfig) -> None:
        """Compares the form with the model's configuration. Raises as `check_form` does."""
        form = form_of(call)
        known = self._last.get(config.name)
        if known is not None and known[1] == form and known[0] is config:
            return
        check_form(call, config)
        # The elements of BYTES are checked too, and are no part of the form.
        if not any(tensor.datatype == "BYTES" for tensor in call.inputs):
            self._last[config.name] = config, form


def form_of(call: InferCall) -> Form:
    """All that `check_form` looks at of a request without BYTES, but for the id that its errors name."""
    return call.outputs, [(tensor.name, tensor.datatype, tensor.shape, len(tensor.raw)) for tensor in call.inputs]


def check_form(call: InferCall, config: ModelConfig) -> None:
    """The outputs that a request asks for, and its inputs, are those of the configuration. Raises RequestError."""
    check_outputs(call, config)
    check_inputs(call, config)


def check_outputs(call: InferCall, config: ModelConfig) -> None:
    """Every output asked for is declared, and asked for once."""
    if not call.outputs:
        return
    declared = {output.name for output in config.outputs}
    seen: set[str] = set()
    for name in call.outputs:
        if name in seen:
            raise error_about(call, f"output '{name}' already exists in request")
        seen.add(name)
    for name in call.outputs:
        if name not in declared:
            raise RequestError(f"unexpected inference output '{name}' for model '{config.name}'")


def check_inputs(call: InferCall, config: ModelConfig) -> None:
    """Number, names, batch size, datatype, shape and byte count of every input."""
    specs = config.inputs_by_name
    given: dict[str, Tensor] = {}
    for tensor in call.inputs:
        if tensor.name in given:
            raise error_about(call, f"input '{tensor.name}' already exists in request")
        given[tensor.name] = tensor
    if given.keys() != specs.keys():
        _check_names(call, config, given)
    if config.max_batch_size > 0:
        _check_batch(call, config)
    for tensor in call.inputs:
        _check_tensor(call, config, specs[tensor.name], tensor)


def _check_names(call: InferCall, config: ModelConfig, given: Mapping[str, Tensor]) -> None:
    specs = config.inputs_by_name
    reserved = reserved_names(config) - specs.keys()
    for name in given:
        # Triton would complain of the number of inputs first, which says nothing of what is wrong.
        if name in reserved:
            raise RequestError(f"unexpected inference input '{name}' for model '{config.name}'")
    required = [spec.name for spec in config.inputs if not spec.optional]
    if not len(required) <= len(given) <= len(specs):
        raise _count_error(call, config, given, required)
    for name in given:
        if name not in specs:
            raise RequestError(f"unexpected inference input '{name}' for model '{config.name}'")
    # Triton counts and does not look: there an optional input passes for a required one that is missing.
    if not given.keys() >= set(required):
        raise _count_error(call, config, given, required)


def reserved_names(config: ModelConfig) -> frozenset[str]:
    """Tensors that the batcher makes: controls and implicit states. A client must not send them."""
    batching = config.sequence_batching
    if batching is None:
        return frozenset()
    return frozenset([c.name for c in batching.controls] + [s.input_name for s in batching.states])


def _count_error(
    call: InferCall, config: ModelConfig, given: Mapping[str, Tensor], required: Sequence[str]
) -> RequestError:
    expected = (
        f"expected {len(config.inputs)} inputs"
        if len(required) == len(config.inputs)
        else f"expected number of inputs between {len(required)} and {len(config.inputs)}"
    )
    missing = _quoted([name for name in required if name not in given])
    return error_about(
        call,
        f"{expected} but got {len(given)} inputs for model '{config.name}'. Got input(s) {_quoted(sorted(given))}, "
        f"but missing required input(s) {missing}. Please provide all required input(s).",
    )


def _quoted(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _check_batch(call: InferCall, config: ModelConfig) -> None:
    for tensor in call.inputs:
        if not tensor.shape:
            raise error_about(
                call, f"input '{tensor.name}' has no shape but model requires batch dimension for '{config.name}'"
            )
        if tensor.shape[0] != call.inputs[0].shape[0]:
            raise error_about(call, f"input '{tensor.name}' batch size does not match other inputs for '{config.name}'")
    if call.inputs and call.inputs[0].shape[0] > config.max_batch_size:
        raise error_about(call, f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'")


def _check_tensor(call: InferCall, config: ModelConfig, spec: TensorSpec, tensor: Tensor) -> None:
    if tensor.datatype != spec.datatype:
        raise error_about(
            call,
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{config.name}' "
            f"expects '{spec.datatype}'",
        )
    batched = config.max_batch_size > 0
    if tensor.shape and min(tensor.shape) < 0:
        raise error_about(
            call,
            f"All input dimensions should be specified for input '{tensor.name}' for model '{config.name}', got "
            f"{shape_text(tensor.shape)}",
        )
    dims = tensor.shape[1:] if batched else tensor.shape
    # A batch of no rows would be nothing to answer; Triton lets it through to the backend, where it fails.
    fits = len(dims) == len(spec.dims) and not (batched and tensor.shape[0] == 0)
    if not fits or (dims != spec.dims and any(w not in (-1, got) for w, got in zip(spec.dims, dims, strict=True))):
        expected = (-1, *spec.dims) if batched else spec.dims
        raise error_about(
            call,
            f"unexpected shape for input '{tensor.name}' for model '{config.name}'. Expected "
            f"{shape_text(expected)}, got {shape_text(tensor.shape)}. " + (BATCH_NOTE if batched else ""),
        )
    _check_bytes(call, config, tensor)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as Triton's messages write it: `[1,-1,16]`."""
    return "[" + ",".join(map(str, shape)) + "]"


def _check_bytes(call: InferCall, config: ModelConfig, tensor: Tensor) -> None:
    elements = element_count(tensor.shape)
    size = ELEMENT_BYTES.get(tensor.datatype)
    if size is None:
        if call.string_problems is None:
            problem = string_problem(tensor.raw, elements, tensor.name, config.name)
        else:
            problem = call.string_problems[tensor.name]
        if problem:
            raise error_about(call, problem)
    elif len(tensor.raw) != elements * size:
        raise error_about(
            call,
            f"input byte size mismatch for input '{tensor.name}' for model '{config.name}'. "
            f"Expected {elements * size}, got {len(tensor.raw)}",
        )


def input_bytes(call: InferCall) -> int:
    """Bytes of a request's inputs."""
    return sum([len(tensor.raw) for tensor in call.inputs])


def has_many_strings(call: InferCall) -> bool:
    """Whether walking the BYTES inputs takes too long for the event loop. Then the caller walks them in a thread."""
    return any(tensor.datatype == "BYTES" and len(tensor.raw) > STRINGS_BYTES_MAX for tensor in call.inputs)


def with_strings_read(call: InferCall) -> InferCall:
    """The call with `string_problems` filled in: for each BYTES input what is wrong with it. For a thread."""
    problems = {
        tensor.name: string_problem(tensor.raw, element_count(tensor.shape), tensor.name, call.model)
        for tensor in call.inputs
        if tensor.datatype == "BYTES"
    }
    return msgspec.structs.replace(call, string_problems=problems)


def string_problem(raw: bytes, expected: int, name: str, model: str) -> str:
    """What is wrong with a BYTES tensor's bytes, "" when nothing is. No element is copied."""
    where = f"for inference input '{name}' for model '{model}'"
    position, end, count = 0, len(raw), 0
    unpack = struct.Struct("<I").unpack_from
    while position < end:
        if count == expected:
            # As Triton does: the element beyond the last one is an error already.
            return f"unexpected number of string elements {count + 1} {where}, expecting {expected}"
        if position + 4 > end:
            return (
                f"incomplete string length indicator {where}, expecting 4 bytes but only {end - position} bytes "
                "available. Please make sure the string length indicator is in one buffer."
            )
        (length,) = unpack(raw, position)
        position += 4
        if position + length > end:
            return (
                f"incomplete string data {where}, expecting string of length {length} but only {end - position} bytes "
                "available"
            )
        position += length
        count += 1
    if count != expected:
        return f"expected {expected} string elements {where}, got {count}"
    return ""


# -- stateless models -----------------------------------------------------------------------------------------------


def _stateless(call: InferCall, config: ModelConfig, version: str, arrived_ns: int) -> Admitted:
    # The mesh does not act on sequence parameters here. It passes them on to the model with the request, as in Triton.
    queueing = queueing_of(call, config)
    flags = (START if call.start else 0) | (END if call.end else 0)
    message = _message(call, version, call.correlation_id, queueing.level, arrived_ns, flags=flags)
    return Admitted(message, queueing=queueing)


def queueing_of(call: InferCall, config: ModelConfig) -> Queueing:
    """The queue level of a stateless request, with that level's policy.

    A priority out of range means the default level, without an error. A request's timeout counts only where it is
    shorter than its level's, and its level lets it. Where the level has no timeout, the request's is ignored. All of it
    as in Triton; in the dialect (`own_timeouts`) a request's timeout counts in every level.
    """
    rows = rows_of(config, call.inputs)
    batching = config.dynamic_batching
    if batching is None:
        return Queueing(rows=rows)
    level, policy = 0, batching.default_queue_policy
    if batching.priority_levels:
        level = call.priority if 1 <= call.priority <= batching.priority_levels else batching.default_priority_level
        policy = batching.priority_queue_policies.get(level, policy)
    timeout_us = policy.default_timeout_us
    may_lower = policy.allow_timeout_override or batching.own_timeouts
    if (may_lower and 0 < call.timeout_us < timeout_us) or (batching.own_timeouts and not timeout_us):
        timeout_us = call.timeout_us
    return Queueing(
        level=level,
        level_bound=policy.max_queue_size,
        timeout_us=timeout_us,
        delays=policy.timeout_action is TimeoutAction.DELAY,
        rows=rows,
        shape=ShapeKeys(config).text_of(call.inputs),
        # Answers of a decoupled model are ordered among those of their own request only.
        ordered=batching.preserve_ordering and not config.decoupled,
    )


# -- sequences ------------------------------------------------------------------------------------------------------


def _step(
    call: InferCall,
    config: ModelConfig,
    version: str,
    arrived_ns: int,
    make_session: Callable[[], int | str],
) -> Admitted:
    batching = config.sequence_batching
    assert batching is not None, "only sequence models come here"
    if config.max_batch_size > 0 and call.inputs and call.inputs[0].shape[0] > 1:
        raise RequestError(
            f"inference request to model '{config.name}' must specify batch-size 1 due to requirements of sequence "
            "batcher"
        )
    made = None
    correlation_id = named_sequence(call, config)
    if not correlation_id and batching.iterative:
        return _own_sequence(call, config, version, arrived_ns, make_session())
    if not correlation_id:
        # START and END are about a sequence that the client knows, so they need its id (sequence extension).
        if not batching.implicit_start or call.start or call.end:
            raise _nameless(config)
        correlation_id = made = make_session()
    check_correlation_id(correlation_id)
    correlation_id = _check_id_type(call, config, correlation_id)
    continues = call.expected_step is not None and call.expected_step > 1
    if continues and (call.start or made is not None):
        raise RequestError(
            f"inference request for sequence {correlation_id} to model '{config.name}' starts it, and says by "
            f"parameter 'sequence_step' that it is step {call.expected_step}: steps are counted from START, "
            "which is step 1"
        )
    flags = (
        (START if call.start or made is not None else 0)
        # A request of an iterative model is the whole of its sequence, by whatever name (triton-spec 1.10).
        | (END if call.end or batching.iterative else 0)
        # A request with `sequence_step` 2 or more belongs to a sequence that has begun. If that sequence is over, the
        # step must be refused; IMPLICIT would begin a new sequence with it.
        | (IMPLICIT if (batching.implicit_start or call.session_id is not None) and not continues else 0)
        | (DURABLE if config.recoverable else 0)
        | (PAGEABLE if config.pageable else 0)
        | (TOLD if call.wait_info or call.wait_max_ms else 0)
    )
    requested = check_version_text(call.version) + (call.part.scope if call.part is not None else "")
    return Admitted(
        # The END that is added above is the mesh's own: the model gets END only if the client sent one.
        _message(call, version, correlation_id, 0, arrived_ns, own_sequence=batching.iterative and not call.end),
        sequence=sequence_id(config.name, requested, correlation_id),
        flags=flags,
        session_id=None if made is None else str(made),
        timeout_is_ignored=batching.timeout_action is TimeoutAction.DELAY,
    )


def _own_sequence(
    call: InferCall, config: ModelConfig, version: str, arrived_ns: int, correlation_id: CorrelationId
) -> Admitted:
    """A request to an iterative model that names no sequence: it becomes a sequence of one step.

    The batcher sets START and END itself; the request's own flags are ignored, as in Triton. The sequence's id is made
    here, and no client learns it (triton-spec 1.10).
    """
    asks = TOLD if call.wait_info or call.wait_max_ms else 0
    flags = START | END | ALONE | (DURABLE if config.recoverable else 0) | asks
    return Admitted(
        _message(call, version, correlation_id, 0, arrived_ns, own_sequence=True),
        sequence=sequence_id(config.name, check_version_text(call.version), correlation_id),
        flags=flags,
    )


def admit_end(call: InferCall, record: ModelRecord, version: str, *, arrived_ns: int) -> Admitted:
    """Checks a request that ends a run of a sequence without a step (`InferCall.ended_run`). Raises RequestError."""
    config = record.config
    if config.sequence_batching is None:
        raise RequestError(f"'sequence_close' is for models with sequences of their own, and '{config.name}' has none")
    if call.inputs or call.start or call.end or call.expected_step is not None:
        raise RequestError(
            f"'sequence_close' ends a sequence of model '{config.name}' without a step: leave inputs and the step's "
            "parameters out, or end the sequence by a step with 'sequence_end'"
        )
    correlation_id = named_sequence(call, config)
    if not correlation_id:
        raise _nameless(config)
    check_correlation_id(correlation_id)
    correlation_id = _check_id_type(call, config, correlation_id)
    return Admitted(
        _message(call, version, correlation_id, 0, arrived_ns),
        sequence=sequence_id(config.name, check_version_text(call.version), correlation_id),
    )


def _nameless(config: ModelConfig) -> RequestError:
    return RequestError(
        f"inference request to model '{config.name}' must specify a non-zero or non-empty correlation ID"
    )


def named_sequence(call: InferCall, config: ModelConfig) -> CorrelationId:
    """The correlation id that a request names, by parameter or by session; 0 or "" when it names none.

    A session id is a string. For a model whose CORRID control is an integer, a decimal session id is read as that
    integer, and any other text becomes one by a stable hash: without these rules no client could use the session header
    with such a model. A control of 32 bits has no room for a hash that tells sessions apart, so there the text stays,
    and is refused.
    """
    if call.correlation_id or call.session_id is None:
        if call.correlation_id and call.session_id and str(call.correlation_id) != call.session_id:
            raise RequestError(
                f"inference request to model '{config.name}' names sequence '{call.correlation_id}' and session "
                f"'{call.session_id}': name one of them"
            )
        return call.correlation_id
    if not call.session_id or not wants_integer_id(config):
        return call.session_id
    if call.session_id.isascii() and call.session_id.isdigit() and int(call.session_id) <= UINT64_MAX:
        return int(call.session_id)
    check_correlation_id(call.session_id)
    assert config.sequence_batching is not None
    control = config.sequence_batching.correlation_id
    return session_number(call.session_id) if control and control.datatype in WIDE_IDS else call.session_id


def session_number(session_id: str) -> int:
    """The integer id of a session that is named by a text: a positive int64, the same in every gateway."""
    return (int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=8).digest()) >> 1) | 1


def wants_integer_id(config: ModelConfig) -> bool:
    """Whether the model has a CORRID control of an integer type."""
    batching = config.sequence_batching
    control = batching.correlation_id if batching else None
    return control is not None and control.datatype != "BYTES"


def _check_id_type(call: InferCall, config: ModelConfig, correlation_id: CorrelationId) -> CorrelationId:
    """The id has the type that the model's CORRID control needs; without that control any type will do."""
    assert config.sequence_batching is not None
    control = config.sequence_batching.correlation_id
    if control is None or (control.datatype == "BYTES") == isinstance(correlation_id, str):
        return correlation_id
    given = "BYTES" if isinstance(correlation_id, str) else "UINT64"
    raise error_about(
        call,
        f"sequence batching control '{control.name}' data-type is '{given}', but model '{config.name}' "
        f"expects '{control.datatype}'",
    )


def _message(
    call: InferCall,
    version: str,
    correlation_id: CorrelationId,
    priority: int,
    arrived_ns: int,
    *,
    own_sequence: bool = False,
    flags: int = 0,
) -> InferMessage:
    message = InferMessage(
        call.model,
        version,
        call.request_id,
        correlation_id,
        call.inputs,
        call.outputs,
        priority,
        call.timeout_us,
        call.parameters,
        arrived_ns=arrived_ns,
        # Only a client that names the step can ask for it again.
        keep_reply=bool(call.request_id) or call.expected_step is not None,
        own_sequence=own_sequence,
        flags=flags,
    )
    if (origin := call.origin) is None:
        return message
    return msgspec.structs.replace(message, call=origin.name, chain=origin.chain, deadline_ms=origin.deadline_ms)
