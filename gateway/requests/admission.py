"""Decides whether a request may enter the mesh, and as what. Pure: request and configuration in, step or error out.

The same rules for both protocols, in the order in which Triton checks them, with its texts (triton-spec 1.2, 1.3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from gateway.models.versions import check_version_text
from gateway.requests.forms import KnownForms, check_form
from gateway.requests.infer_call import InferCall, check_correlation_id, error_about, has_own_name
from shared.contract.batch_shape import Queueing, ShapeKeys, rows_of
from shared.contract.errors import RequestError
from shared.contract.ids import CorrelationId, SequenceId, correlation_id_from, sequence_id
from shared.contract.messages import END, START, InferMessage, ModelRecord, StepFlag, next_salt
from shared.contract.model_config import ModelConfig, TimeoutAction
from shared.contract.parameters import UINT64_MAX

WIDE_IDS = ("UINT64", "INT64")
"""Types of a CORRID control that can hold the hash of a session's text."""
IMPLICIT, DURABLE, ALONE = int(StepFlag.IMPLICIT), int(StepFlag.DURABLE), int(StepFlag.ALONE)
PAGEABLE, TOLD, NAMED = int(StepFlag.PAGEABLE), int(StepFlag.TOLD), int(StepFlag.NAMED)


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
    call: InferCall, config: ModelConfig, version: str, arrived_ns: int, make_session: Callable[[], int | str]
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
    check_id(call, config, correlation_id)
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
        # A follower in an ensemble is known by its number.
        | (NAMED if has_own_name(call) and call.expected_step is None else 0)
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
    check_id(call, config, correlation_id)
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
    number = correlation_id_from(call.session_id, string=False)
    if isinstance(number, int) and number <= UINT64_MAX:
        return number
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


def check_id(call: InferCall, config: ModelConfig, correlation_id: CorrelationId) -> None:
    """The id may be carried, and has the type that the model's CORRID control needs; without one any type will do.

    Raises RequestError.
    """
    check_correlation_id(correlation_id)
    assert config.sequence_batching is not None
    control = config.sequence_batching.correlation_id
    if control is not None and (control.datatype == "BYTES") != isinstance(correlation_id, str):
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
        salt=next_salt(),
    )
    if (origin := call.origin) is None:
        return message
    return msgspec.structs.replace(message, call=origin.name, chain=origin.chain, deadline_ms=origin.deadline_ms)
