"""Tensor data as JSON: nested or flat arrays to bytes, and bytes to flat arrays. Pure; source: triton-spec 5.3, 5.4.

How the elements are nested does not count, only their number. Where Triton cuts an integer off that is too large for
its datatype, it is refused here: a wrong number is worse than an error.

Elements are Python objects for a while, many times as large as their text: nothing is copied whole, and what was read
goes as soon as it can.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gateway.rest.json_values import INT64_MAX, INT64_MIN, UINT64_MAX, JsonError, array_of
from shared.contract.errors import Code, RequestError
from shared.contract.tensors import NUMPY_TYPE, Tensor, bytes_elements, element_count, pack_bytes, to_numpy

NO_JSON_FORM = ("FP16", "BF16")
"""Datatypes that travel only as binary data."""
PIECE = 1 << 14
"""Elements that are copied at once."""
WRONG_COUNT = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def tensor_of_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """A tensor whose data came as JSON. The data is used up.

    A tensor without elements takes no notice of its data. The number of strings is not checked here: a BYTES tensor is
    compared with its shape like one that came as binary data.

    raises  JsonError in Triton's words for elements of the wrong type or number, RequestError for a datatype without
            a JSON form and for integers out of the datatype's range
    """
    count = element_count(shape)
    if count == 0:
        return Tensor(name, datatype, shape, b"")
    elements = flatten(array_of(data, "data"))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _strings(elements))
    if datatype in NO_JSON_FORM:
        raise RequestError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    dtype = NUMPY_TYPE.get(datatype)
    if dtype is None:
        raise RequestError(f"invalid datatype for input {name}")
    # As Triton reads element by element, a wrong type before the shape's end comes before a wrong number.
    for piece in _pieces(min(count, len(elements))):
        check_elements(elements[piece], dtype)
    if len(elements) != count:
        raise JsonError(WRONG_COUNT)
    array = np.empty(count, dtype)
    try:
        with np.errstate(over="ignore"):
            for piece in _pieces(count):
                array[piece] = np.array(elements[piece], dtype=dtype)
    except OverflowError as error:
        raise RequestError(
            f"Unable to parse 'data': an element of input '{name}' is out of the range of {datatype}"
        ) from error
    elements.clear()
    return Tensor(name, datatype, shape, array.tobytes())


def _pieces(count: int) -> Iterator[slice]:
    """The first so many elements, a few at a time."""
    return (slice(begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE))


def flatten(elements: list[Any]) -> list[Any]:
    """The elements of nested arrays, row by row. The arrays are used up."""
    while True:
        kinds = set(map(type, elements))
        if list not in kinds:
            return elements
        if kinds != {list}:
            return list(_walk(elements))
        flat: list[Any] = []
        for index, row in enumerate(elements):
            flat += row
            elements[index] = None
        elements = flat


def _walk(elements: list[Any]) -> Iterator[Any]:
    """The same where arrays and elements are mixed; the depth was bounded when the document was read."""
    for element in elements:
        if isinstance(element, list):
            yield from _walk(cast("list[Any]", element))
        else:
            yield element


def _strings(elements: list[Any]) -> bytes:
    if not set(map(type, elements)) <= {str}:
        raise JsonError("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return pack_bytes(elements)


def check_elements(elements: list[Any], dtype: np.dtype[Any]) -> None:
    """Every element (there is one) is of the JSON type that the datatype is read from; integers are of 64 bits."""
    kinds = set(map(type, elements))
    match dtype.kind:
        case "b":
            if not kinds <= {bool, int} or not set(elements) <= {0, 1}:
                raise _wrong("boolean", "boolean")
        case "f":
            if not kinds <= {float, int}:
                raise _wrong("number", "double")
        case "u":
            if not kinds <= {int} or min(elements) < 0 or max(elements) > UINT64_MAX:
                raise _wrong("unsigned-integer", "unsigned-integer")
        case _:
            if not kinds <= {int} or min(elements) < INT64_MIN or max(elements) > INT64_MAX:
                raise _wrong("signed-integer", "signed-integer")


def _wrong(found: str, wanted: str) -> JsonError:
    return JsonError(f"Unable to parse 'data': attempt to access JSON non-{found} as {wanted}")


def json_of_tensor(tensor: Tensor) -> NDArray[Any] | list[str]:
    """A tensor's elements in the flat form that goes into a response; a numpy array for what orjson can write itself.

    raises  RequestError for datatypes without a JSON form, and for BYTES elements that are no text
    """
    if tensor.datatype in NO_JSON_FORM:
        raise RequestError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
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
    except (ValueError, struct.error) as error:
        raise RequestError(
            f"output tensor shape does not match size of output for '{tensor.name}'", Code.INTERNAL
        ) from error
