"""Tensor data as JSON: nested or flat arrays to bytes, and bytes to flat arrays. Pure; source: triton-spec 5.3, 5.4.

Only the number of the elements counts, not how they are nested. An integer that is too large for its datatype is
refused, where Triton truncates it: a wrong number is worse than an error.

Parsed elements are Python objects, many times as large as their text. So they are never copied as a whole, and each is
freed as soon as it was read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gateway.bounds.pieces import pieces
from gateway.rest.json_values import JsonError, array_of
from gateway.rest.long_arrays import LongArray
from shared.contract.errors import Code, RequestError
from shared.contract.parameters import INT64_MAX, INT64_MIN, UINT64_MAX
from shared.contract.tensors import NUMPY_TYPE, Tensor, bytes_elements, element_count, pack_bytes, to_numpy

NO_JSON_FORM = ("FP16", "BF16")
"""Datatypes that travel only as binary data."""
WRONG_COUNT = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def tensor_of_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """Makes a tensor of JSON data. The lists in `data` cannot be used afterwards.

    If the shape has no elements, or no dimensions, which fits no model, the data is ignored, as in Triton: `forms`
    refuses the shape. It also compares the number of strings with the shape, as it does for binary data.

    raises  JsonError in Triton's words for elements of the wrong type or number, RequestError for a datatype without
            a JSON form and for integers out of the datatype's range
    """
    count = element_count(shape)
    if count == 0 or not shape:
        return Tensor(name, datatype, shape, b"")
    parts = map(flatten, data.elements() if isinstance(data, LongArray) else (array_of(data, "data"),))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, b"".join(map(_strings, parts)))
    if datatype in NO_JSON_FORM:
        raise RequestError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    dtype = NUMPY_TYPE.get(datatype)
    if dtype is None:
        raise RequestError(f"invalid datatype for input {name}")
    raw: list[bytes] = []
    try:
        with np.errstate(over="ignore"):
            for elements in parts:
                raw += _converted(elements, dtype, count)
                count -= len(elements)
                elements.clear()
    except OverflowError as error:
        raise RequestError(
            f"Unable to parse 'data': an element of input '{name}' is out of the range of {datatype}"
        ) from error
    if count:
        raise JsonError(WRONG_COUNT)
    return Tensor(name, datatype, shape, b"".join(raw))


def _converted(elements: list[Any], dtype: np.dtype[Any], count_max: int) -> Iterator[bytes]:
    """The bytes of these elements. Raises JsonError if they are more, OverflowError."""
    # Triton reads element by element. So an element of the wrong type within the shape is reported before a wrong
    # number of elements.
    for piece in pieces(min(count_max, len(elements))):
        check_elements(elements[piece], dtype)
    if len(elements) > count_max:
        raise JsonError(WRONG_COUNT)
    return (np.array(elements[piece], dtype=dtype).tobytes() for piece in pieces(len(elements)))


def flatten(elements: list[Any]) -> list[Any]:
    """The elements of nested arrays, row by row. Removes the rows from their arrays, to free memory early."""
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
    """As `flatten`, where a list mixes arrays and elements. `parse` has bounded the recursion."""
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
    """Checks that every element has the JSON type of the datatype, and that integers fit 64 bits. Needs an element."""
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
    """A tensor's elements as the flat array of a response: a numpy array where orjson can write it, else a list.

    FP32 becomes FP64, which holds the same numbers. Of FP32 orjson writes the few digits that tell neighbours apart,
    and a client that reads JSON's doubles would get another number: 123456790 for 123456792.

    raises  RequestError for datatypes without a JSON form, and for BYTES elements that are no text
    """
    if tensor.datatype in NO_JSON_FORM:
        raise RequestError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if tensor.datatype != "BYTES":
        elements = to_numpy(tensor).reshape(-1)
        return elements.astype(np.float64) if tensor.datatype == "FP32" else elements
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
