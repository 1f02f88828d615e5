"""Converts gRPC inference messages to the mesh's values and back. Pure: message in, value or error out.

Raw tensor bytes are handed on as protobuf gives them, never decoded. Only the protocol's own form is checked here;
`gateway.requests.admission` checks the request against its model.

Repeated fields are read by a slice (`field[:]`), which copies them in C. Iterating would call back into Python for each
element, at two to three times the cost for a small request.

Source: triton-spec section 6; KServe v2 protocol, gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.grpc.contents import pack_contents
from gateway.grpc.metadata import NO_METADATA, CallMetadata
from gateway.grpc.pb import AnyMessage, InferParameter, InferRequest, InferResponse, StreamInferResponse, pb
from gateway.requests.classification import WEIGHT, classified
from gateway.requests.headers import RESERVED_PREFIX
from gateway.requests.infer_call import InferCall, check_correlation_id, check_named_once
from gateway.requests.regions import NO_REGIONS, RegionPart, Regions
from gateway.requests.waiting import Answer
from shared.contract.endpoints import Endpoint
from shared.contract.errors import MeshError, RequestError
from shared.contract.ids import CorrelationId
from shared.contract.parameters import EMPTY_FINAL_RESPONSE, FINAL_RESPONSE, UINT64_MAX, Parameter, write_parameters
from shared.contract.tensors import RANK_MAX, Tensor

RESERVED_REFUSAL = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
    f"'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"
)
CLASSIFICATION = "classification"
SHARED_MEMORY_REGION = "shared_memory_region"
SHARED_MEMORY_SIZES = ("shared_memory_offset", "shared_memory_byte_size")
OutputForms = Mapping[str, int | RegionPart]
"""Outputs that the client wants otherwise than as raw contents: as so many classes, or in shared memory."""
RAW_OUTPUTS: OutputForms = {}
BULKY_BYTES = 1 << 18
"""Answers that are written into shared memory beyond this size are encoded in a thread. An output that is classified
counts as WEIGHT times as large."""


# -- request --------------------------------------------------------------------------------------------------------


def decode_request(
    request: InferRequest,
    metadata: CallMetadata = NO_METADATA,
    regions: Regions = NO_REGIONS,
    endpoint: Endpoint = Endpoint.MODEL_INFER,
) -> InferCall:
    """The call that a request makes.

    regions  inputs in shared memory are read from them
    raises  RequestError (INVALID_ARG or UNSUPPORTED) with Triton's words
    """
    correlation_id: CorrelationId = 0
    start = end = False
    rare: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    parameters = request.parameters
    for key in parameters:
        value = parameters[key]
        if key == "sequence_id":
            correlation_id = correlation_id_of(value)
        elif key == "sequence_start":
            start = flag_of(key, value)
        elif key == "sequence_end":
            end = flag_of(key, value)
        elif (known := RARE_PARAMETERS.get(key)) is not None:
            field, read = known
            rare[field] = read(key, value)
        else:
            read_other(key, value, custom)
    call = InferCall(
        request.model_name,
        request.model_version,
        request.id,
        correlation_id,
        start,
        end,
        inputs=decode_inputs(request, regions),
        outputs=tuple(dict.fromkeys([output.name for output in request.outputs[:]])),
        parameters=custom,
        endpoint=endpoint,
    )
    if metadata is not NO_METADATA:
        rare |= {
            "session_id": metadata.session_id,
            "trace_headers": metadata.trace_headers,
            "origin": metadata.call,
            "tenant": metadata.tenant,
        }
        custom |= metadata.forwarded
    return msgspec.structs.replace(call, **rare) if rare else call


def correlation_id_of(parameter: InferParameter) -> CorrelationId:
    """The correlation id.

    int64_param is read as unsigned: clients send ids beyond 2**63 in it. uint64_param is refused, as in Triton.
    """
    match parameter.WhichOneof("parameter_choice"):
        case "int64_param":
            return parameter.int64_param & UINT64_MAX
        case "string_param":
            check_correlation_id(parameter.string_param)
            return parameter.string_param
        case _:
            raise RequestError("invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")


def flag_of(key: str, parameter: InferParameter) -> bool:
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise RequestError(f"invalid value type for '{key}' parameter, expected bool_param.")
    return parameter.bool_param


def run_of(key: str, parameter: InferParameter) -> str:
    """The name of a sequence's run, as an answer told it."""
    if parameter.WhichOneof("parameter_choice") != "string_param" or not parameter.string_param:
        raise RequestError(f"invalid value for '{key}' parameter, expected string_param that is not empty.")
    return parameter.string_param


def number_of(key: str, parameter: InferParameter) -> int:
    """A count that begins with 1."""
    return count_of(key, parameter, at_least=1)


def count_of(key: str, parameter: InferParameter, *, at_least: int = 0) -> int:
    """A parameter that must be an integer, signed or unsigned, of at least `at_least`."""
    match parameter.WhichOneof("parameter_choice"):
        case "int64_param":
            value: int = parameter.int64_param
        case "uint64_param":
            value = parameter.uint64_param
        case _:
            raise RequestError(f"invalid value type for '{key}' parameter, expected int64_param or uint64_param.")
    if value < at_least:
        raise RequestError(f"invalid value for '{key}', expected value >= {at_least}.")
    return value


def timeout_of(key: str, parameter: InferParameter) -> int:
    """The request's timeout, microseconds."""
    check_choice(parameter, "int64_param", f"'{key}' parameter")
    return count_of(key, parameter)


def read_other(key: str, parameter: InferParameter, custom: dict[str, Parameter]) -> None:
    """Adds a parameter without a meaning for the mesh to `custom`, for the model. Refuses reserved names."""
    if key.startswith(RESERVED_PREFIX):
        raise RequestError(RESERVED_REFUSAL)
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise RequestError(
            f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
        )
    custom[key] = getattr(parameter, choice)


RARE_PARAMETERS: Mapping[str, tuple[str, Callable[[str, InferParameter], Any]]] = {
    "sequence_step": ("expected_step", number_of),
    "sequence_answer": ("first_answer", number_of),
    "sequence_wait_info": ("wait_info", flag_of),
    "sequence_wait_max_ms": ("wait_max_ms", number_of),
    "sequence_run_info": ("run_info", flag_of),
    "sequence_close": ("ended_run", run_of),
    EMPTY_FINAL_RESPONSE: ("wants_empty_final", flag_of),
    "priority": ("priority", count_of),
    "timeout": ("timeout_us", timeout_of),
}
"""The parameters with a meaning for the mesh that most requests do not have: the field of `InferCall`, and what reads
its value. A struct takes the longer to make, the more fields are named."""


def decode_inputs(request: InferRequest, regions: Regions) -> tuple[Tensor, ...]:
    """The request's tensors: raw contents as they are, typed contents packed, parts of shared memory read.

    The raw contents belong, in their order, to the inputs that are not in shared memory. A request uses raw or typed
    contents for all of these.
    """
    model: str = request.model_name
    raw: list[bytes] = request.raw_input_contents[:]
    inputs = request.inputs[:]
    if len(inputs) > 1:
        # Triton knows the inputs before it looks for their data.
        check_named_once([tensor.name for tensor in inputs], request.id)
    tensors: list[Tensor] = []
    index = in_regions = 0
    for tensor in inputs:
        part = region_part_of(tensor, regions) if tensor.parameters else None
        if part is not None:
            if tensor.HasField("contents"):
                raise RequestError(
                    f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for "
                    f"model '{model}'"
                )
            data = regions.read(part, taken=in_regions)
            tensors.append(Tensor(tensor.name, tensor.datatype, shape_of(tensor, model), data))
            in_regions += part.byte_size
            continue
        own = raw[index] if index < len(raw) else None
        tensors.append(decode_input(tensor, own, model, typed_allowed=not raw))
        index += 1
    if len(raw) > index:
        raise RequestError(f"unexpected additional input data for model '{model}'")
    return tuple(tensors)


def decode_input(tensor: InferRequest, raw: bytes | None, model: str, *, typed_allowed: bool) -> Tensor:
    """One input; `raw` is its part of the raw contents, None when there is none."""
    name: str = tensor.name
    datatype: str = tensor.datatype
    if tensor.HasField("contents"):
        if not typed_allowed:
            raise RequestError(
                f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
            )
        raw = pack_contents(tensor.contents, datatype, name, model)
    if raw is None:
        raise RequestError(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
    return Tensor(name, datatype, shape_of(tensor, model), raw)


def shape_of(tensor: InferRequest, model: str) -> tuple[int, ...]:
    """An input's shape. Raises RequestError for one of too many dimensions."""
    dims = tensor.shape
    if len(dims) > RANK_MAX:
        raise RequestError(
            f"input '{tensor.name}' for model '{model}' has {len(dims)} dimensions, of at most {RANK_MAX}"
        )
    return tuple(dims[:])


def requested_forms(request: InferRequest, regions: Regions = NO_REGIONS) -> OutputForms:
    """Outputs that the client wants as their k largest elements (parameter `classification`), or in shared memory.

    The first form of an output counts, as in Triton.

    raises  RequestError for a k below 1, for a part of shared memory that is not there, and for both at once
    """
    forms: dict[str, int | RegionPart] = {}
    for output in request.outputs[:]:
        parameters = output.parameters
        if not parameters:
            continue
        part = region_part_of(output, regions)
        classes = class_count_of(parameters[CLASSIFICATION]) if CLASSIFICATION in parameters else None
        if part is not None and classes is not None:
            raise RequestError("output can't set both 'shared_memory_region' and 'classification'")
        if part is not None or classes is not None:
            forms.setdefault(output.name, part or classes or 0)
    return forms


def class_count_of(parameter: InferParameter) -> int:
    """How many classes the client wants. Triton's error says >= 0, but 0 is refused."""
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise RequestError("invalid value type for 'classification' parameter, expected int64_param")
    if parameter.int64_param <= 0:
        raise RequestError("invalid value for 'classification' parameter, expected >= 0")
    return parameter.int64_param


def region_part_of(tensor: AnyMessage, regions: Regions) -> RegionPart | None:
    """The part of shared memory that an input or output names; None when it names none."""
    name: str = tensor.name
    parameters = tensor.parameters
    for key in SHARED_MEMORY_SIZES:
        if key in parameters and SHARED_MEMORY_REGION not in parameters:
            raise RequestError(
                f"'{key}' can not be specified without '{SHARED_MEMORY_REGION}' parameter for tensor '{name}'"
            )
    if SHARED_MEMORY_REGION not in parameters:
        return None
    given = parameters[SHARED_MEMORY_REGION]
    check_choice(given, "string_param", f"'{SHARED_MEMORY_REGION}' parameter for tensor '{name}'")
    sizes: list[int] = []
    for key in SHARED_MEMORY_SIZES:
        if key in parameters:
            check_choice(parameters[key], "int64_param", f"'{key}' parameter for tensor '{name}'")
        sizes.append(parameters[key].int64_param if key in parameters else 0)
    if SHARED_MEMORY_SIZES[1] not in parameters:
        raise RequestError(
            f"'{SHARED_MEMORY_SIZES[1]}' must be specified along with '{SHARED_MEMORY_REGION}' parameter for tensor "
            f"'{name}'"
        )
    return regions.part(given.string_param, *sizes)


def check_choice(parameter: AnyMessage, choice: str, what: str) -> None:
    """Raises RequestError when a parameter has another type than it must."""
    if parameter.WhichOneof("parameter_choice") != choice:
        raise RequestError(f"invalid value type for {what}, expected {choice}.")


# -- response -------------------------------------------------------------------------------------------------------


def is_bulky(answer: Answer, forms: OutputForms) -> bool:
    """Whether encoding the answer takes too long for the event loop. forms: as from `requested_forms`"""
    wanted = [(output, forms[output.name]) for output in answer.message.outputs if output.name in forms]
    return sum([len(output.raw) * (WEIGHT if isinstance(form, int) else 1) for output, form in wanted]) > BULKY_BYTES


def encode_answer(answer: Answer, forms: OutputForms = RAW_OUTPUTS) -> InferResponse:
    """The message that answers a unary call.

    forms   as from `requested_forms`; outputs that the client wants in shared memory are written there
    raises  RequestError for an output that cannot be classified, or does not fit into its part of shared memory
    """
    response = pb.ModelInferResponse()
    fill_response(response, answer, forms)
    return response


def encode_stream_answer(answer: Answer, forms: OutputForms = RAW_OUTPUTS) -> StreamInferResponse:
    """The message that answers one request of a stream; otherwise as `encode_answer`."""
    message = pb.ModelStreamInferResponse()
    # Filled in place: protobuf copies a message that is assigned to a field.
    response = message.infer_response
    fill_response(response, answer, forms)
    response.parameters[FINAL_RESPONSE].bool_param = not answer.message.more
    return message


def encode_stream_error(error: MeshError, request_id: str, model: str, *, is_last: bool = True) -> StreamInferResponse:
    """The message by which one request of a stream fails. The stream goes on.

    Parameters (`code`, `reason`, `last_step`, `retry`, ...) say what a unary call's status and trailing metadata would.
    For a request that Redis had accepted, the message names its model, and says whether it is the final response. A
    refused request has no response, so its message does neither.
    """
    message = pb.ModelStreamInferResponse(error_message=error.message or error.code.value)
    response = message.infer_response
    response.id = request_id
    if error.accepted:
        response.model_name = model
        response.parameters[FINAL_RESPONSE].bool_param = is_last
    write_parameters(response.parameters, {"code": error.code.value})
    write_parameters(response.parameters, error.facts)
    return message


def fill_response(response: InferResponse, answer: Answer, forms: OutputForms) -> None:
    """Writes an answer into an empty ModelInferResponse, with raw outputs."""
    response.model_name = answer.model.config.name
    response.model_version = answer.version
    if answer.request_id:
        response.id = answer.request_id
    for output in answer.message.outputs:
        form = forms.get(output.name) if forms else None
        tensor = classified(output, form, answer.model) if isinstance(form, int) else output
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if isinstance(form, RegionPart):
            form.write(tensor.name, tensor.raw)
            # Clients count the contents along with the outputs.
            response.raw_output_contents.append(b"")
        else:
            response.raw_output_contents.append(tensor.raw)
    if answer.parameters:
        write_parameters(response.parameters, answer.parameters)
