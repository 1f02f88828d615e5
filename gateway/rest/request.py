"""Decodes the body of an inference request. Pure: bytes and headers in, `InferCall` or RequestError out.

The body is a JSON object, optionally followed by the binary data of its inputs, one after the other (binary tensor
data extension). Binary data is sliced, never decoded. Source: triton-spec 5.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import msgspec

from gateway.requests.headers import RESERVED_PREFIX
from gateway.requests.infer_call import InferCall, check_correlation_id, named_twice, with_id
from gateway.requests.regions import NO_REGIONS, RegionPart, Regions
from gateway.rest.json_tensors import tensor_of_json
from gateway.rest.json_values import (
    Json,
    JsonError,
    array_member,
    array_of,
    bool_of,
    members,
    object_of,
    parse_object,
    text_member,
    text_of,
    unsigned_of,
)
from shared.contract.errors import RequestError
from shared.contract.ids import CorrelationId
from shared.contract.model_config import ModelConfig
from shared.contract.parameters import INT64_MAX, INT64_MIN, UINT64_MAX, Parameter
from shared.contract.tensors import ELEMENT_BYTES, RANK_MAX, Tensor, element_count


class OutputForm(msgspec.Struct, frozen=True):
    """The form in which the client wants one output.

    classes  0 for the tensor itself, else the number of classes
    part     where in shared memory it is to be written; None: it is part of the response
    """

    binary: bool = False
    classes: int = 0
    part: RegionPart | None = None


JSON_FORM, BINARY_FORM = OutputForm(), OutputForm(binary=True)


class OutputForms(msgspec.Struct, frozen=True):
    """The forms in which the client wants the outputs: those that it lists, and all others."""

    listed: Mapping[str, OutputForm] = msgspec.field(default_factory=dict[str, OutputForm])
    other: OutputForm = JSON_FORM

    def of(self, output: str) -> OutputForm:
        return self.listed.get(output, self.other)


def decode(
    body: bytes,
    call: InferCall,
    config_of: Callable[[], ModelConfig],
    *,
    header_length: int | None = None,
    regions: Regions = NO_REGIONS,
) -> tuple[InferCall, OutputForms]:
    """The call in a body, and the forms in which the client wants the outputs.

    call           what the path and the headers say of it
    config_of      looks the model's configuration up; called only for a body without JSON
    header_length  `Inference-Header-Content-Length`, None without that header
    regions        inputs in shared memory are read from them
    raises         RequestError in Triton's words
    """
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise RequestError(f"inference header size should be in range (0, {len(body)}), got: {length}")
    if length == 0:
        # Without JSON, the body is the data of the model's only input.
        call = msgspec.structs.replace(call, inputs=(raw_input(body, config_of()),))
        return call, OutputForms(other=BINARY_FORM)
    return decode_json(body, length, call, regions)


def decode_json(
    body: bytes, length: int, call: InferCall, regions: Regions = NO_REGIONS
) -> tuple[InferCall, OutputForms]:
    """The call in a body that begins with `length` bytes of JSON, followed by binary data."""
    decoded = _decode_known(body, length, call)
    if decoded is not None:
        return decoded
    document = parse_object(body if length == len(body) else body[:length])
    fields, binary_output = _request_fields(document)
    inputs = _inputs(document, memoryview(body)[length:], call.model, regions, fields["request_id"])
    outputs, forms = _outputs(document, regions)
    call = msgspec.structs.replace(call, inputs=inputs, outputs=outputs, **fields)
    return call, OutputForms(forms, BINARY_FORM if binary_output else JSON_FORM)


def _request_fields(document: Json) -> tuple[dict[str, Any], bool]:
    """What a document says of the request itself, as fields of `InferCall`; and whether outputs that it does not list
    are to be binary."""
    fields: dict[str, Any] = {"request_id": text_of(document.get("id", ""), "id")}
    binary_output = False
    custom: dict[str, Parameter] = {}
    for key, value in members(document.get("parameters", {}), "failed to get request params.: ").items():
        if (known := MESH_PARAMETERS.get(key)) is not None:
            field, read = known
            fields[field] = read(value, key)
        elif key == "binary_data_output":
            binary_output = bool_of(value, key)
        elif key.startswith(RESERVED_PREFIX):
            raise RequestError(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[key] = custom_parameter(key, value)
    fields["parameters"] = custom
    return fields, binary_output


def raw_input(body: bytes, config: ModelConfig) -> Tensor:
    """The model's only input, with the body as the bytes of one batch row. A variable dimension follows from the size.

    raises  RequestError, with Triton's words about `raw_input`
    """
    if len(config.inputs) != 1:
        raise _raw_error(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    batch = (1,) if config.max_batch_size > 0 else ()
    if spec.datatype == "BYTES":
        if spec.dims != (1,):
            raise _raw_error(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        return Tensor(spec.name, "BYTES", (*batch, 1), len(body).to_bytes(4, "little") + body)
    if spec.dims.count(-1) > 1:
        raise _raw_error(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    fixed = element_count([dim for dim in spec.dims if dim != -1]) * ELEMENT_BYTES[spec.datatype]
    shape = tuple(len(body) // fixed if dim == -1 else dim for dim in spec.dims)
    expected = element_count(shape) * ELEMENT_BYTES[spec.datatype]
    if len(body) != expected:
        raise _raw_error(
            f"input byte size mismatch for input 'raw_input' for model '{config.name}'. Expected {expected}, got "
            f"{len(body)}"
        )
    return Tensor(spec.name, spec.datatype, (*batch, *shape), body)


def _raw_error(text: str) -> RequestError:
    """An error of a raw request. Its prefix names no request: a body without JSON has no request id."""
    return RequestError(with_id("", text))


# -- inputs ---------------------------------------------------------------------------------------------------------


def _inputs(document: Json, binary: memoryview, model: str, regions: Regions, request_id: str) -> tuple[Tensor, ...]:
    position = in_regions = 0
    tensors: list[Tensor] = []
    names: set[str] = set()
    for tensor in array_member(document, "inputs"):
        name, datatype, shape, parameters = _described(tensor)
        if name in names:
            raise named_twice(name, request_id)
        names.add(name)
        if (part := _part_of(parameters, regions)) is not None:
            tensors.append(Tensor(name, datatype, shape, regions.read(part, taken=in_regions)))
            in_regions += part.byte_size
            continue
        if "binary_data_size" not in parameters:
            tensors.append(tensor_of_json(name, datatype, shape, tensor["data"]))
            continue
        size = unsigned_of(parameters["binary_data_size"], "binary_data_size")
        if position + size > len(binary):
            missing = position + size - len(binary)
            raise RequestError(
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{model}'"
            )
        tensors.append(Tensor(name, datatype, shape, bytes(binary[position : position + size])))
        position += size
    if position != len(binary):
        raise RequestError(f"unexpected additional input data for model '{model}'")
    return tuple(tensors)


def _described(tensor: Any) -> tuple[str, str, tuple[int, ...], Json]:
    """What a document says of an input: its name, datatype, shape and parameters."""
    parameters = object_of(object_of(tensor).get("parameters"))
    check_one_source(tensor, parameters)
    return text_member(tensor, "name"), text_member(tensor, "datatype"), _shape(tensor), parameters


def _shape(tensor: Json) -> tuple[int, ...]:
    dims = array_member(tensor, "shape")
    if len(dims) > RANK_MAX:
        raise RequestError(f"Unable to parse 'shape': it has {len(dims)} dimensions, of at most {RANK_MAX}")
    shape = tuple([unsigned_of(dim, "shape") for dim in dims])
    if shape and max(shape) > INT64_MAX:
        raise RequestError("Unable to parse 'shape': a dimension is larger than 2**63 - 1")
    return shape


def check_one_source(tensor: Any, parameters: Json) -> None:
    """Checks that an input's data is in exactly one place: in the JSON, behind it, or in shared memory."""
    found = [name for name in ("binary_data_size", "shared_memory_region") if name in parameters]
    if "data" in object_of(tensor):
        found.insert(0, "data")
    if len(found) != 1:
        where = "set " + " ".join(f"'{name}'" for name in found) if found else "no field is set"
        raise RequestError(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {where}"
        )


# -- known tensors --------------------------------------------------------------------------------------------------

BEGIN_OF_TENSORS = re.compile(rb', ?"inputs" ?:')
KNOWN_TENSORS, KNOWN_BYTES = 256, 1 << 10
"""How many ends of documents are kept when they have been read, and how large one may be."""


class TensorsPart(msgspec.Struct, frozen=True):
    """What the end of a document says of the tensors, where the data of all inputs is binary.

    inputs  name, datatype, shape and bytes of each
    size    bytes of all inputs
    """

    inputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
    size: int
    outputs: tuple[str, ...]
    forms: Mapping[str, OutputForm]


def _decode_known(body: bytes, length: int, call: InferCall) -> tuple[InferCall, OutputForms] | None:
    """As `decode_json`, for a document whose end, with the tensors, was read before: a client sends the same end with
    each step of a sequence. None if it must be read as a whole, also if anything is wrong with it.

    A document is cut before its last members, `"inputs"` and what follows. Each half is an object when its brace is put
    back, so the whole is one, with the members of both.
    """
    begin = BEGIN_OF_TENSORS.search(body, 0, length) if length < len(body) else None
    if begin is None or length - (cut := begin.start()) > KNOWN_BYTES:
        return None
    tensors = _read_tensors(body[cut:length])
    if tensors is None or length + tensors.size != len(body):
        return None
    try:
        document = parse_object(body[:cut] + b"}")
    except RequestError:
        return None
    if not document or "inputs" in document or "outputs" in document:
        return None
    fields, binary_output = _request_fields(document)
    inputs: list[Tensor] = []
    for name, datatype, shape, size in tensors.inputs:
        inputs.append(Tensor(name, datatype, shape, body[length : length + size]))
        length += size
    call = msgspec.structs.replace(call, inputs=tuple(inputs), outputs=tensors.outputs, **fields)
    return call, OutputForms(tensors.forms, BINARY_FORM if binary_output else JSON_FORM)


@lru_cache(KNOWN_TENSORS)
def _read_tensors(text: bytes) -> TensorsPart | None:
    """What the end of a document, from the comma before `"inputs"`, says of the tensors; None if it is no end, says
    something else too, or puts data anywhere but behind the document.
    """
    try:
        document = parse_object(b"{" + text[1:])
        if document.keys() - {"inputs", "outputs"}:
            return None
        inputs: list[tuple[str, str, tuple[int, ...], int]] = []
        for tensor in array_member(document, "inputs"):
            name, datatype, shape, parameters = _described(tensor)
            size = unsigned_of(parameters.get("binary_data_size"), "binary_data_size")
            inputs.append((name, datatype, shape, size))
        outputs, forms = _outputs(document, NO_REGIONS)
    except RequestError:
        return None
    return TensorsPart(tuple(inputs), sum(size for *_, size in inputs), outputs, forms)


# -- outputs --------------------------------------------------------------------------------------------------------


def _outputs(document: Json, regions: Regions) -> tuple[tuple[str, ...], dict[str, OutputForm]]:
    """The names of the requested outputs, in the client's order, and their forms. What lists an output first counts."""
    listed: dict[str, OutputForm] = {}
    for output in array_of(document.get("outputs", []), "outputs"):
        parameters = object_of(object_of(output).get("parameters"))
        name = text_member(output, "name")
        # As in Triton, the request's default does not apply to an output that is listed.
        form = OutputForm(
            classes=unsigned_of(parameters.get("classification", 0), "classification", verb="set"),
            part=_output_part(parameters, regions),
            binary=bool_of(parameters.get("binary_data", False), "binary_data"),
        )
        listed.setdefault(name, form)
    return tuple(listed), listed


def _output_part(parameters: Json, regions: Regions) -> RegionPart | None:
    """Where in shared memory an output is to be written; None: nowhere."""
    if "shared_memory_region" in parameters:
        if "classification" in parameters:
            raise RequestError("Output can't set both 'shared_memory_region' and 'classification'")
        if bool_of(parameters.get("binary_data", False), "binary_data", verb="set"):
            raise RequestError("Output can't set both 'shared_memory_region' and 'binary_data'")
    return _part_of(parameters, regions)


def _part_of(parameters: Json, regions: Regions) -> RegionPart | None:
    """The part of a region that the parameters of an input or output name; None: they name no region. Offset and size
    are unsigned also without one, as in Triton.
    """
    is_named = "shared_memory_region" in parameters
    region = text_member(parameters, "shared_memory_region") if is_named else ""
    offset = unsigned_of(parameters.get("shared_memory_offset", 0), "shared_memory_offset")
    byte_size = unsigned_of(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size")
    return regions.part(region, offset, byte_size) if is_named else None


# -- request parameters ---------------------------------------------------------------------------------------------


def sequence_id_of(value: Any, key: str) -> CorrelationId:
    """A correlation id: a uint64 or a string."""
    if type(value) is int and 0 <= value <= UINT64_MAX:
        return value
    check_correlation_id(text_of(value, key))
    return value


def run_of(value: Any, key: str) -> str:
    """The name of a sequence's run, as an answer told it."""
    if not (run := text_of(value, key)):
        raise RequestError(f"Unable to parse '{key}': the name of a run is not empty")
    return run


def number_of(value: Any, key: str, what: str) -> int:
    """A number that is at least 1. what: is counted"""
    number = unsigned_of(value, key)
    if not number:
        raise RequestError(f"Unable to parse '{key}': {what} are counted from 1")
    return number


MESH_PARAMETERS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "sequence_id": ("correlation_id", sequence_id_of),
    "sequence_start": ("start", bool_of),
    "sequence_end": ("end", bool_of),
    "sequence_step": ("expected_step", partial(number_of, what="steps")),
    "sequence_answer": ("first_answer", partial(number_of, what="answers")),
    "sequence_wait_info": ("wait_info", bool_of),
    "sequence_wait_max_ms": ("wait_max_ms", partial(number_of, what="milliseconds")),
    "sequence_run_info": ("run_info", bool_of),
    "sequence_close": ("ended_run", run_of),
    "priority": ("priority", unsigned_of),
    "timeout": ("timeout_us", unsigned_of),
}
"""The parameters with a meaning for the mesh: the field of `InferCall`, and what makes its value of value and key."""


def custom_parameter(key: str, value: Any) -> Parameter:
    """A parameter without a meaning for the mesh, for the model. A number beyond int64 becomes a double."""
    if not isinstance(value, (str, int, float)):
        raise RequestError(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    if type(value) is int and not INT64_MIN <= value <= INT64_MAX:
        try:
            return float(value)
        except OverflowError as error:
            raise JsonError(f"Unable to parse '{key}': Number too big to be stored in double.") from error
    return value
