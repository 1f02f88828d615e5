"""An inference request's body to a call. Pure: bytes and headers in, `InferCall` or RequestError out.

The body is a JSON object, optionally followed by the binary data of its inputs, one after the other (binary tensor
data extension). Binary data is sliced, never decoded. Source: triton-spec 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from gateway.admission import InferCall, Parameter, check_correlation_id
from gateway.metadata import SHARED_MEMORY_REFUSAL
from gateway.rest.json_tensors import nesting_error, tensor_of_json
from shared.errors import Code, RequestError
from shared.limits import JSON_NESTING_MAX
from shared.model_config.values import ModelConfig
from shared.tensors import ELEMENT_BYTES, Tensor, element_count

Json = dict[str, Any]
RESERVED_PREFIX = "triton_"
UINT64_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How one output is wanted. classes: 0 for the tensor itself, else as that many classes."""

    binary: bool = False
    classes: int = 0


@dataclass(frozen=True, slots=True)
class OutputForms:
    """How the outputs are wanted: those that were listed, and all others."""

    listed: Mapping[str, OutputForm] = field(default_factory=dict[str, OutputForm])
    other: OutputForm = OutputForm()

    def of(self, output: str) -> OutputForm:
        """The form of one output."""
        return self.listed.get(output, self.other)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the body: path and headers.

    header_length  `Inference-Header-Content-Length`, None without that header
    """

    model: str
    version: str = ""
    header_length: int | None = None
    session_id: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])


def decode_infer(body: bytes, envelope: Envelope) -> tuple[InferCall, OutputForms]:
    """The call that a body makes. `header_length` 0 is not for here: see `decode_raw`."""
    length = check_header_length(envelope.header_length, len(body))
    document = parse_object(body if length is None else body[:length])
    binary = memoryview(b"" if length is None else body)[length or 0 :]
    parameters = _Parameters()
    for key, value in _object(document, "parameters").items():
        parameters.read(key, value)
    return (
        InferCall(
            model=envelope.model,
            version=envelope.version,
            request_id=_text(document, "id"),
            correlation_id=parameters.correlation_id,
            start=parameters.start,
            end=parameters.end,
            expected_step=parameters.expected_step,
            priority=parameters.priority,
            timeout_us=parameters.timeout_us,
            inputs=_inputs(document, binary, envelope.model),
            outputs=tuple(_named(output, "outputs") for output in _array(document, "outputs")),
            parameters=parameters.custom,
            session_id=envelope.session_id,
            trace_headers=envelope.trace_headers,
        ),
        _forms(document, binary_by_default=parameters.binary_output),
    )


def decode_raw(body: bytes, envelope: Envelope, config: ModelConfig) -> tuple[InferCall, OutputForms]:
    """The call of a body that is nothing but the model's only input (`Inference-Header-Content-Length: 0`)."""
    tensor = raw_input(body, config)
    call = InferCall(
        model=envelope.model,
        version=envelope.version,
        inputs=(tensor,),
        session_id=envelope.session_id,
        trace_headers=envelope.trace_headers,
    )
    return call, OutputForms(other=OutputForm(binary=True))


def raw_input(body: bytes, config: ModelConfig) -> Tensor:
    """The model's only input, as the bytes of one batch row; a variable dimension is what the bytes make it."""
    if len(config.inputs) != 1:
        raise RequestError(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    if sum(dim == -1 for dim in spec.dims) > 1:
        raise RequestError(
            "The shape of the raw input '" + spec.name + "' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    batch = (1,) if config.max_batch_size > 0 else ()
    fixed = element_count([dim for dim in spec.dims if dim != -1])
    if spec.datatype == "BYTES":
        if fixed != 1:
            raise RequestError(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        shape = tuple(1 for _ in spec.dims)
        return Tensor(spec.name, "BYTES", (*batch, *shape), len(body).to_bytes(4, "little") + body)
    free = len(body) // (fixed * ELEMENT_BYTES[spec.datatype]) if fixed else 0
    shape = tuple(free if dim == -1 else dim for dim in spec.dims)
    return Tensor(spec.name, spec.datatype, (*batch, *shape), body)


def check_header_length(length: int | None, body_length: int) -> int | None:
    """The JSON's length, if it can be that of this body."""
    if length is not None and not 0 <= length <= body_length:
        raise RequestError(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length


def parse_object(text: bytes) -> Json:
    """A JSON object. Raises RequestError that says where it is broken."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "recursion" in str(error).lower():
            raise nesting_error() from error
        raise RequestError(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from error
    if text.count(b"[") + text.count(b"{") > JSON_NESTING_MAX:
        _check_depth(document)
    if not isinstance(document, dict):
        raise RequestError("failed to parse the request JSON buffer: the request must be a JSON object")
    return cast("Json", document)


def _check_depth(document: Any) -> None:
    """Refuses nesting beyond the limit; level by level, so that it needs no stack of its own."""
    level: list[Any] = [document]
    for _ in range(JSON_NESTING_MAX):
        inner: list[Any] = []
        for value in level:
            items = cast("Json", value).values() if isinstance(value, dict) else value
            inner += [item for item in items if isinstance(item, (list, dict))]
        if not inner:
            return
        level = inner
    raise nesting_error()


# -- members of the document ----------------------------------------------------------------------------------------


def _object(document: Json, key: str) -> Json:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"Unable to parse '{key}': attempt to access JSON non-object as object")
    return cast("Json", value)


def _array(document: Json, key: str, *, required: bool = False) -> list[Any]:
    value = document.get(key)
    if value is None:
        if required:
            raise RequestError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
        return []
    if not isinstance(value, list):
        raise RequestError(f"Unable to parse '{key}': attempt to access JSON non-array as array")
    return cast("list[Any]", value)


def _text(document: Json, key: str, *, required: bool = False) -> str:
    value = document.get(key)
    if value is None and not required:
        return ""
    if value is None:
        raise RequestError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    if not isinstance(value, str):
        raise RequestError(f"Unable to parse '{key}': attempt to access JSON non-string as string")
    return value


def _named(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise RequestError(f"Unable to parse '{where}': attempt to access JSON non-object as object")
    return _text(cast("Json", value), "name", required=True)


def unsigned(key: str, value: Any) -> int:
    """A number that must be a non-negative integer of 64 bits."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise RequestError(f"Unable to parse '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def boolean(key: str, value: Any) -> bool:
    """A value that must be true or false."""
    if type(value) is not bool:
        raise RequestError(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean")
    return value


# -- inputs ---------------------------------------------------------------------------------------------------------


def _inputs(document: Json, binary: memoryview, model: str) -> tuple[Tensor, ...]:
    position = 0
    tensors: list[Tensor] = []
    for value in _array(document, "inputs", required=True):
        name = _named(value, "inputs")
        tensor: Json = value
        datatype = _text(tensor, "datatype", required=True)
        shape = _shape(tensor)
        size = _binary_size(tensor, name)
        if size is None:
            tensors.append(tensor_of_json(name, datatype, shape, tensor["data"]))
            continue
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


def _shape(tensor: Json) -> tuple[int, ...]:
    shape = _array(tensor, "shape", required=True)
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise RequestError(
                "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
            )
    return tuple(shape)


def _binary_size(tensor: Json, name: str) -> int | None:
    """Bytes of binary data, None for data in the JSON itself; exactly one of the two must be there."""
    parameters = _object(tensor, "parameters")
    if "shared_memory_region" in parameters:
        raise RequestError(SHARED_MEMORY_REFUSAL, Code.UNSUPPORTED)
    size = parameters.get("binary_data_size")
    if (size is None) != (tensor.get("data") is None):
        return None if size is None else unsigned("binary_data_size", size)
    found = "no field is set" if size is None else "set 'data' and 'binary_data_size'"
    raise RequestError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {found} for input '{name}'"
    )


# -- outputs --------------------------------------------------------------------------------------------------------


def _forms(document: Json, *, binary_by_default: bool) -> OutputForms:
    listed: dict[str, OutputForm] = {}
    for output in _array(document, "outputs"):
        parameters = _object(output, "parameters")
        if "shared_memory_region" in parameters:
            for other in ("classification", "binary_data"):
                if other in parameters:
                    raise RequestError(f"Output can't set both 'shared_memory_region' and '{other}'")
            raise RequestError(SHARED_MEMORY_REFUSAL, Code.UNSUPPORTED)
        # As in Triton, an output that is listed goes by its own flag alone.
        listed[output["name"]] = OutputForm(
            binary=boolean("binary_data", parameters.get("binary_data", False)),
            classes=unsigned("classification", parameters.get("classification", 0)),
        )
    return OutputForms(listed, OutputForm(binary=binary_by_default))


# -- request parameters ---------------------------------------------------------------------------------------------


class _Parameters:
    """The request's parameters, as they are read."""

    __slots__ = (
        "binary_output",
        "correlation_id",
        "custom",
        "end",
        "expected_step",
        "priority",
        "start",
        "timeout_us",
    )

    def __init__(self) -> None:
        self.correlation_id: int | str = 0
        self.start = False
        self.end = False
        self.expected_step: int | None = None
        self.priority = 0
        self.timeout_us = 0
        self.binary_output = False
        self.custom: dict[str, Parameter] = {}

    def read(self, key: str, value: Any) -> None:
        """Takes one parameter over. Raises RequestError for a wrong type."""
        match key:
            case "sequence_id":
                self.correlation_id = sequence_id_of(value)
            case "sequence_start":
                self.start = boolean(key, value)
            case "sequence_end":
                self.end = boolean(key, value)
            case "sequence_step":
                self.expected_step = unsigned(key, value)
                if not self.expected_step:
                    raise RequestError("Unable to parse 'sequence_step': steps are counted from 1")
            case "priority":
                self.priority = unsigned(key, value)
            case "timeout":
                self.timeout_us = unsigned(key, value)
            case "binary_data_output":
                self.binary_output = boolean(key, value)
            case _:
                self.custom[key] = custom_parameter(key, value)


def sequence_id_of(value: Any) -> int | str:
    """A correlation id: a uint64 or a string."""
    if isinstance(value, str):
        check_correlation_id(value)
        return value
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise RequestError(
            "Unable to parse 'sequence_id': attempt to access JSON value that is neither an unsigned integer nor a "
            "string"
        )
    return value


def custom_parameter(key: str, value: Any) -> Parameter:
    """A parameter that is the model's business."""
    if key.startswith(RESERVED_PREFIX):
        raise RequestError(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if not isinstance(value, (str, int, float)):
        raise RequestError(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    return value
