"""An inference request as either protocol brings it, and how errors name it. Pure.

Where a message has Triton's id prefix, it is `[request id: <id>] `; an unnamed request's id reads `<id_unknown>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shared.contract.calls import CallOrigin
from shared.contract.endpoints import Endpoint
from shared.contract.errors import Code, RequestError
from shared.contract.ids import CorrelationId
from shared.contract.limits import CORRELATION_ID_CHARS_MAX
from shared.contract.parameters import Parameter
from shared.contract.tensors import Tensor

PARAMETER_BYTES = 128
"""Memory of a parameter beside its name and its text."""


class EnsemblePart(msgspec.Struct, frozen=True):
    """What makes a step of an ensemble another step than one that a client sends to the same model.

    scope   stands in the sequence's name: sequences of an ensemble's step are not those of clients
    digest  by which the step is recognised when it is sent again; b"" if only its number tells it, or nothing does
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
    within           of a step of an ensemble: traceparent of the whole request's span, "" if that is not recorded; None
                     for what a client sent
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
    within: str | None = None
    origin: CallOrigin | None = None
    endpoint: Endpoint = Endpoint.MODEL_INFER
    first_answer: int = 1
    wants_empty_final: bool = False
    wait_info: bool = False
    wait_max_ms: int = 0
    tenant: str = ""
    run_info: bool = False
    ended_run: str = ""


def input_bytes(call: InferCall) -> int:
    """Bytes of what a client may make as large as it likes: tensors, the request's id and parameters."""
    size = len(call.request_id) + sum([len(tensor.raw) for tensor in call.inputs])
    for name, value in call.parameters.items():
        size += PARAMETER_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
    return size


def has_own_name(call: InferCall) -> bool:
    """Whether the request's id is the name of a model's call, or of the one that its ensemble is called by: the same
    when the call is made again, and no other one's.
    """
    return call.origin is not None and call.request_id != "" and call.origin.is_named(call.request_id)


def with_id(request_id: str, text: str) -> str:
    """A message with Triton's prefix that names the request."""
    return f"[request id: {request_id or '<id_unknown>'}] {text}"


def error_about(call: InferCall, text: str) -> RequestError:
    """The error of a request that Triton names in its text."""
    return RequestError(with_id(call.request_id, text))


def check_named_once(names: Sequence[str], request_id: str) -> None:
    """Refuses a request that has two inputs of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise named_twice(name, request_id)
        seen.add(name)


def named_twice(name: str, request_id: str) -> RequestError:
    """The error of a request that has two inputs of this name."""
    return RequestError(with_id(request_id, f"input '{name}' already exists in request"))


def check_correlation_id(correlation_id: CorrelationId) -> None:
    """Refuses ids that no protocol message may carry; both codecs call it while they read parameters."""
    # Triton counts bytes and calls them characters.
    if isinstance(correlation_id, str) and len(correlation_id.encode()) > CORRELATION_ID_CHARS_MAX:
        raise RequestError(
            f"string correlation ID cannot be longer than {CORRELATION_ID_CHARS_MAX} characters", Code.UNSUPPORTED
        )
