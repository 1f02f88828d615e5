"""A model's call as messages of the v2 protocol over gRPC, and its answer as the model gets it.

gRPC is imported with the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from executor.engine.python.calls import CallAnswer, ModelCall
from shared.contract.calls import ACCEPTED, ANSWERED_KEY, FULL
from shared.contract.errors import Code, Retry, code_of
from shared.contract.messages import END, START
from shared.contract.parameters import EMPTY_FINAL_RESPONSE, FINAL_RESPONSE, INT64_MAX, Parameter, write_parameters
from shared.contract.tensors import Tensor
from shared.store.work_scripts import OVERDUE

RAW_CONTENTS = b"\x3a"
"""Tag of a ModelInferRequest's `raw_input_contents`: field 7, with a length."""
UINT64 = 1 << 64
FIRST_ANSWER = "sequence_answer"
RETRY_KEY = "seqmesh-retry"
CODES = {
    "NOT_FOUND": Code.NOT_FOUND,
    "INVALID_ARGUMENT": Code.INVALID_ARG,
    "UNAVAILABLE": Code.UNAVAILABLE,
    "UNIMPLEMENTED": Code.UNSUPPORTED,
    "ALREADY_EXISTS": Code.ALREADY_EXISTS,
    "CANCELLED": Code.CANCELLED,
    "RESOURCE_EXHAUSTED": Code.RESOURCE_EXHAUSTED,
    "PERMISSION_DENIED": Code.FORBIDDEN,
    "UNKNOWN": Code.UNKNOWN,
}
"""Of gRPC's statuses; any other one is INTERNAL."""
UNKNOWN_MODEL = "Request for unknown model: "
DECOUPLED = "decoupled transaction policy"
NOT_READY = "is not at ready state"
UNSENT = "Internal error from Core"
"""What gRPC says of a stream that was over before its request was sent, in place of how it ended."""


class Outcome(Enum):
    """What an RPC's error says of its call.

    ANSWERED      it is the answer
    AGAIN         the mesh asks for the same request again, later, or nothing is known of the call but that it is over
    GATEWAY_GONE  the gateway has gone, takes nothing, or is full: another one may take the call
    TOO_LATE      the call's deadline has passed
    """

    ANSWERED = auto()
    AGAIN = auto()
    GATEWAY_GONE = auto()
    TOO_LATE = auto()


def rpc_error() -> type[Exception]:
    """The class of gRPC's errors."""
    import grpc  # noqa: PLC0415

    return grpc.aio.AioRpcError


def unsent_error() -> type[Exception]:
    """The class of what gRPC raises when it cannot send because the RPC is over."""
    import grpc  # noqa: PLC0415

    return grpc.aio.InternalError


def request_of(call: ModelCall, first_answer: int = 0) -> bytes:
    """The ModelInferRequest, encoded; the ModelReadyRequest of a call that asks for readiness.

    first_answer  of a stream of responses, the first one that is lacking; 0: there is one response alone
    """
    if call.asks_readiness:
        return _readiness_request(call)
    parts = [_without_contents(call, first_answer).SerializeToString()]
    for tensor in call.inputs:
        parts += (RAW_CONTENTS, encoded_varint(len(tensor.raw)), tensor.raw)
    # protobuf would copy the tensors twice, and let no other thread run meanwhile, so not the event loop either.
    return b"".join(parts)


def _readiness_request(call: ModelCall) -> bytes:
    from tritonclient.grpc import service_pb2  # noqa: PLC0415

    pb: Any = service_pb2
    return pb.ModelReadyRequest(name=call.model, version=call.version).SerializeToString()


def _without_contents(call: ModelCall, first_answer: int) -> Any:
    from tritonclient.grpc import service_pb2  # noqa: PLC0415

    pb: Any = service_pb2
    # A step of a sequence is told by its request id from one that is done already.
    id = call.request_id or (call.name if call.correlation_id else "")
    request: Any = pb.ModelInferRequest(model_name=call.model, model_version=call.version, id=id)
    if isinstance(call.correlation_id, str):
        if call.correlation_id:
            request.parameters["sequence_id"].string_param = call.correlation_id
    elif call.correlation_id:
        signed = call.correlation_id - UINT64 if call.correlation_id > INT64_MAX else call.correlation_id
        request.parameters["sequence_id"].int64_param = signed
    if call.flags & START:
        request.parameters["sequence_start"].bool_param = True
    if call.flags & END:
        request.parameters["sequence_end"].bool_param = True
    if call.timeout_us:
        request.parameters["timeout"].int64_param = call.timeout_us
    if first_answer:
        request.parameters[EMPTY_FINAL_RESPONSE].bool_param = True
    if first_answer > 1:
        request.parameters[FIRST_ANSWER].int64_param = first_answer
    write_parameters(request.parameters, call.parameters)
    for tensor in call.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    for name in call.outputs:
        request.outputs.add(name=name)
    return request


def encoded_varint(value: int) -> bytes:
    """A length as protobuf writes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def answer_of(response: Any) -> CallAnswer:
    outputs = zip(response.outputs, response.raw_output_contents, strict=True)
    tensors = (Tensor(output.name, output.datatype, tuple(output.shape), raw) for output, raw in outputs)
    return CallAnswer(tuple(tensors), _parameters(response.parameters))


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in parameters.items()
        if name != FINAL_RESPONSE
    }


def streamed(call: ModelCall, message: Any) -> tuple[CallAnswer, bool, Outcome]:
    """The answer in a message of a stream; whether it is the last one; and what it says of the call."""
    response = message.infer_response
    about = _parameters(response.parameters)
    was_accepted = FINAL_RESPONSE in response.parameters
    is_last = was_accepted and response.parameters[FINAL_RESPONSE].bool_param
    if not message.error_message:
        return answer_of(response), is_last, Outcome.ANSWERED
    code = code_of(str(about.get("code", Code.INTERNAL)))
    answer = _failure(call, code, message.error_message, was_accepted=was_accepted)
    fate = ACCEPTED if was_accepted else about.get(ANSWERED_KEY)
    # A refused request has no response, and what refuses it is the end.
    return answer, is_last or not was_accepted, _outcome(call, code, message.error_message, about.get("retry"), fate)


def outcome_of(call: ModelCall, error: Any) -> Outcome:
    """What an AioRpcError says of its call."""
    trailing = _trailing(error)
    match error.code().name:
        case "DEADLINE_EXCEEDED":
            return Outcome.TOO_LATE
        case "RESOURCE_EXHAUSTED" if error.details() == FULL:
            return Outcome.GATEWAY_GONE
        case "INTERNAL" if error.details() == UNSENT:
            return Outcome.AGAIN
        case code:
            return _outcome(call, code, error.details() or "", trailing.get(RETRY_KEY), trailing.get(ANSWERED_KEY))


def _outcome(call: ModelCall, code: str, text: str, retry: object, fate: object) -> Outcome:
    """What an error of the mesh says of its call. fate: what became of that, if a gateway says it (`ANSWERED_KEY`)"""
    if retry == Retry.SAME.value:
        return Outcome.AGAIN
    if code in (Code.UNAVAILABLE.value, Code.CANCELLED.value) and retry is None and fate is None:
        return Outcome.GATEWAY_GONE
    return Outcome.AGAIN if is_passing(call, code, text, was_accepted=fate == ACCEPTED) else Outcome.ANSWERED


def is_passing(call: ModelCall, code: str, text: str, *, was_accepted: bool) -> bool:
    """Whether a replayed step does not take this error of the mesh for an answer: the model has no executor or no room
    in its queue now, or a stateless request came too late to its turn. A version that is unloaded may not come back.
    """
    if call.replayed is None or code != Code.UNAVAILABLE.value:
        return False
    return text.endswith(OVERDUE) and not call.correlation_id if was_accepted else NOT_READY not in text


def failure_of(call: ModelCall, error: Any) -> CallAnswer:
    name: str = error.code().name
    code, text = CODES.get(name, Code.INTERNAL), error.details() or name
    return _failure(call, code, text, was_accepted=_trailing(error).get(ANSWERED_KEY) == ACCEPTED)


def _trailing(error: Any) -> dict[str, object]:
    return dict(error.trailing_metadata() or ())


def _failure(call: ModelCall, code: Code, text: str, *, was_accepted: bool) -> CallAnswer:
    """In Triton's words (python_backend, `request_executor.cc`). The code is the error's own: Triton's is INTERNAL."""
    if was_accepted or call.asks_readiness:
        return CallAnswer(error_code=code, error=text)
    if text.startswith(UNKNOWN_MODEL):
        text = f"Failed for execute the inference request. Model '{call.model}' is not ready."
    elif DECOUPLED in text:
        text = (
            f"Model {call.model} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls "
            "for decoupled models.'"
        )
    return CallAnswer(error_code=code, error=f"Model {call.model} - Error when running inference: {text}")
