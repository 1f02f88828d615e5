"""Tensor data as JSON: nested or flat arrays to bytes, and bytes to flat arrays. Pure; source: triton-spec 5.3, 5.4."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shared.errors import Code, RequestError
from shared.limits import JSON_NESTING_MAX
from shared.tensors import NUMPY_TYPE, Tensor, bytes_elements, element_count, pack_bytes, to_numpy

NO_JSON_FORM = ("FP16", "BF16")
"""Datatypes that travel only as binary data."""

ACCEPTED: dict[str, set[type]] = {"BOOL": {bool, int}, "FP32": {float, int}, "FP64": {float, int}, "BYTES": {str}}
"""Python types of JSON elements by datatype; integers only for all that are not listed."""
WANTED = {"BOOL": "boolean", "FP32": "floating-point number", "FP64": "floating-point number", "BYTES": "string"}


def tensor_of_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """A tensor whose data came as JSON; only the number of elements counts, not how they are nested.

    raises  RequestError in Triton's words for elements of the wrong type, number or range
    """
    if datatype in NO_JSON_FORM:
        raise RequestError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if datatype not in NUMPY_TYPE and datatype != "BYTES":
        raise RequestError(f"invalid datatype '{datatype}' for input '{name}'")
    elements = flatten(data)
    if len(elements) != element_count(shape):
        raise RequestError("Unable to parse 'data': Shape does not match true shape of 'data' field", Code.INTERNAL)
    _check_types(name, datatype, elements)
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, pack_bytes(elements))
    if datatype == "BOOL" and not set(elements) <= {0, 1}:
        raise RequestError(f"Unable to parse 'data': input '{name}' of type BOOL has elements other than 0 and 1")
    try:
        with np.errstate(over="ignore"):
            return Tensor(name, datatype, shape, np.array(elements, dtype=NUMPY_TYPE[datatype]).tobytes())
    except OverflowError as error:
        raise RequestError(
            f"Unable to parse 'data': an element of input '{name}' is out of the range of {datatype}"
        ) from error


def flatten(data: Any) -> list[Any]:
    """The elements of nested arrays, row by row."""
    if not isinstance(data, list):
        raise RequestError("Unable to parse 'data': attempt to access JSON non-array as array")
    elements = cast("list[Any]", data)
    for _ in range(JSON_NESTING_MAX):
        kinds = set(map(type, elements))
        if list not in kinds:
            return elements
        if kinds != {list}:
            raise RequestError("Unable to parse 'data': arrays and elements are mixed at one level of nesting")
        elements = [element for row in elements for element in row]
    raise nesting_error()


def nesting_error() -> RequestError:
    """JSON that is nested too deeply."""
    return RequestError(f"JSON nesting depth exceeds maximum allowed limit ({JSON_NESTING_MAX})")


def _check_types(name: str, datatype: str, elements: list[Any]) -> None:
    accepted = ACCEPTED.get(datatype, {int})
    for kind in set(map(type, elements)) - accepted:
        wanted = WANTED.get(datatype, "integer")
        raise RequestError(
            f"Unable to parse 'data': attempt to access JSON non-{wanted} as {wanted} (input '{name}' of type "
            f"{datatype} has an element of type {JSON_NAMES.get(kind, kind.__name__)})"
        )


JSON_NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "floating-point number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def json_of_tensor(tensor: Tensor) -> NDArray[Any] | list[str]:
    """A tensor's elements in the flat form that goes into a response; a numpy array for what orjson can write itself.

    raises  RequestError for datatypes without a JSON form, and for BYTES elements that are no text
    """
    if tensor.datatype in NO_JSON_FORM:
        raise RequestError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output "
            f"{tensor.name}"
        )
    if tensor.datatype != "BYTES":
        return to_numpy(tensor).reshape(-1)
    try:
        return [element.decode() for element in bytes_elements(tensor.raw)]
    except UnicodeDecodeError as error:
        raise RequestError(
            f"output '{tensor.name}' has elements that are no UTF-8 text and cannot be sent via JSON. Please use the "
            f"binary data format for output {tensor.name}"
        ) from error
