"""Reads JSON as Triton does: by member, with the error texts and codes of Triton's JSON library. Pure.

In Triton a malformed document is INTERNAL, not INVALID_ARG, so clients see status 500. A value that should be an object
and is not counts as an object without members, which is no error by itself. Source: triton-spec 5.3; observed answers
of Triton 2.51.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from uuid import uuid4

import numpy as np
import orjson

from gateway.rest.long_arrays import LongArray, long_arrays, outside_strings
from shared.contract.errors import Code, RequestError
from shared.contract.limits import JSON_NESTING_MAX
from shared.contract.parameters import UINT64_MAX
from shared.process import collector

Json = dict[str, Any]
INTEGER_DIGITS_MAX = 20
LARGE_BYTES = 1 << 18
"""Beyond this size the long arrays of a document are read in pieces (`gateway.rest.long_arrays`)."""
MEMBERS_MAX = 100_000
"""Members of all objects of a document. Each that is new takes 1 us, in which no other thread runs: 8 s for 64 MiB."""
VALUES_MAX = 1_000_000
"""Commas, arrays and objects of a document besides those in long arrays: 0.1 us each, in which no other thread runs.
Also all braces."""
MARK_BYTES = 34
"""Of what stands for a long array: a string of 32 digits."""
BYTE_ORDER_MARK = "\ufeff".encode()
"""Some editors and shells begin a file of UTF-8 with it. Triton passes over it."""
NON_FINITE = (b"NaN", b"Inf")
"""Beginnings of numbers that JSON does not have. Triton reads them, and Python's clients write them."""


TRITONS_WORDS = {
    "Input is a zero-length, empty document": "The document is empty.",
    "input data is empty": "The document is empty.",
    "unexpected content after document": "The document root must not be followed by other values.",
    "unexpected character, expected a JSON value": "Invalid value.",
    "unexpected character, expected a string key": "Missing a name for object member.",
    "unexpected character, expected ':' after key": "Missing a colon after a name of object member.",
    "unexpected character, expected ',' or '}'": "Missing a comma or '}' after an object member.",
    "unexpected character, expected ',' or ']'": "Missing a comma or ']' after an array element.",
    "number is infinity when parsed as double": "Number too big to be stored in double.",
    "no digit after decimal point": "Miss fraction part in number.",
    "no digit after exponent sign": "Miss exponent in number.",
    "no digit after sign": "Invalid value.",
    "invalid literal, expected 'true'": "Invalid value.",
    "invalid literal, expected 'false'": "Invalid value.",
    "invalid literal, expected 'null'": "Invalid value.",
    "invalid escaped sequence in string": "Invalid escape character in string.",
    "no low surrogate in string": "The surrogate pair in string is invalid.",
    "invalid low surrogate in string": "The surrogate pair in string is invalid.",
    # Of a short document that opens more arrays than it closes; nobody lacks memory.
    "failed to allocate memory": "Invalid value.",
}
"""orjson's error text -> that of Triton's JSON library. Where one text of orjson stands for several of Triton's, as at
the end of the document, it is kept."""
NOT_UTF8 = "str is not valid UTF-8"
"""Beginning of an error text of orjson, which has no position."""


class JsonError(RequestError):
    """A malformed document, or a value of the wrong type."""

    code = Code.INTERNAL


def parse(text: bytes) -> Any:
    """Parses a document. In a large one, long arrays are `LongArray`.

    raises  JsonError with the position of the mistake, RequestError for too deep nesting and for too many values
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if len(text) > LARGE_BYTES:
        with collector.at_rest():
            return _parse_large(text)
    document = _parse(text)
    if text.count(b"[") + text.count(b"{") > JSON_NESTING_MAX:
        _put_in({}, [document])
    return document


def _parse_large(text: bytes) -> Any:
    arrays = long_arrays(text, _parse, JSON_NESTING_MAX, _check_size)
    rest, marks = _without(text, arrays)
    _check_values(rest)
    document = _parse(rest, place=partial(_place, arrays))
    _put_in(marks, [document])
    return document


def _without(text: bytes, arrays: Sequence[LongArray]) -> tuple[bytes, dict[str, LongArray]]:
    """A document with a string in place of each of its arrays, and the arrays by these strings."""
    if not arrays:
        return text, {}
    # A client could know no mark before.
    marks = {uuid4().hex: array for array in arrays}
    parts, end = list[bytes](), 0
    for mark, array in marks.items():
        parts += text[end : array.begin], b'"%b"' % mark.encode()
        end = array.end
    return b"".join((*parts, text[end:])), marks


def _place(arrays: Sequence[LongArray], position: int) -> int:
    """Where in its document something is that is at `position` of the document without the arrays."""
    for array in arrays:
        if position > array.begin:
            position += array.end - array.begin - MARK_BYTES
    return position


def _put_in(marks: Mapping[str, LongArray], value: Json | list[Any], depth: int = 0) -> None:
    """Puts the arrays where their marks are. Refuses nesting beyond the limit, and so recurses no further.

    value  at this depth of the document, which itself is in a list
    """
    if depth > JSON_NESTING_MAX:
        raise nesting_error()
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and (array := marks.get(inner)) is not None:
                if depth + array.depth > JSON_NESTING_MAX:
                    raise nesting_error()
                value[key] = array
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, list | dict):
            _put_in(marks, cast("Json | list[Any]", inner), depth + 1)


def _parse(text: bytes, begin: int = 0, place: Callable[[int], int] | None = None) -> Any:
    """begin: of the text in the document, or `place` says where in it a position of the text is"""
    place = place or begin.__add__
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:
            raise nesting_error() from error
        if not error.msg.startswith(NOT_UTF8) and not any(word in text for word in NON_FINITE):
            raise _broken(TRITONS_WORDS.get(error.msg, error.msg), place(error.pos)) from error
        return _parse_non_finite(text, place)


def parsing_bytes(text: bytes) -> int:
    """The most memory, in bytes, that the parsed values of a document take besides its text.

    A number takes 32 and its slot in an array 8; an empty array 56; a string 56; an object 64, with a member 184; a
    letter beyond Latin-1 up to 4. A further member takes 110 besides its value, but there are only MEMBERS_MAX. Of long
    arrays there are only the tensors, twice: 16 for an element.
    """
    elements = text.count(b",")
    places = elements * 64 + text.count(b"[") * 72 + text.count(b"{") * 256
    places = min(places, elements * 16 + VALUES_MAX * 80 + MEMBERS_MAX * 256)
    return places if text.isascii() else places + 3 * len(text)


def parse_object(text: bytes) -> Json:
    """Parses a document and returns its members; none for a document that is no object."""
    return object_of(parse(text))


def _check_size(members: int, braces: int) -> None:
    if members > MEMBERS_MAX:
        raise RequestError(f"the objects of a request in JSON may have {MEMBERS_MAX} members together, not more")
    if braces > VALUES_MAX:
        raise _too_many_values()


def _check_values(text: bytes) -> None:
    """Refuses a document with too many values. Lets other threads run."""
    marks = (ord(","), ord("["), ord("{"))
    if sum([text.count(mark) for mark in marks]) > VALUES_MAX:
        pieces = outside_strings(text, 0, len(text))
        if sum(np.count_nonzero(codes == mark) for _, codes in pieces for mark in marks) > VALUES_MAX:
            raise _too_many_values()


def _too_many_values() -> RequestError:
    return RequestError(
        f"a request in JSON may have {VALUES_MAX} values besides the elements of long arrays that are members of "
        "objects, not more"
    )


def _parse_non_finite(text: bytes, place: Callable[[int], int]) -> Any:
    """Parses a document that may have numbers like `NaN` and `-Infinity`. Slower, so used only for such a document."""
    try:
        with collector.at_rest():
            document = json.loads(text.decode(), parse_int=_integer)
        if b"\\u" in text:
            # Python accepts a lone surrogate in a string, but it cannot be encoded. Encoding raises here, on purpose.
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except json.JSONDecodeError as error:
        raise _broken(error.msg, place(error.pos)) from error
    except UnicodeError as error:
        raise _broken("Invalid encoding in string.", place(getattr(error, "start", 0))) from error
    except RecursionError as error:
        raise nesting_error() from error


def _integer(digits: str) -> int | float:
    """Reads an integer as orjson does: one beyond 64 bits becomes a double."""
    return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else float(digits)


def _broken(what: str, position: int) -> JsonError:
    return JsonError(f"failed to parse the request JSON buffer: {what} at {position}")


def nesting_error() -> RequestError:
    return RequestError(f"JSON nesting depth exceeds maximum allowed limit ({JSON_NESTING_MAX})")


# -- members --------------------------------------------------------------------------------------------------------
# Each raises JsonError for a member that is not there, or a value of another type than its name says.


def object_of(value: Any) -> Json:
    """The value's members; none for a value that is no object."""
    return cast("Json", value) if isinstance(value, dict) else {}


def members(value: Any, where: str = "") -> Json:
    """The members of a value that must be an object. where: beginning of the error's text."""
    if not isinstance(value, dict):
        raise JsonError(f"{where}attempt to get members for non-object")
    return cast("Json", value)


def member(owner: Any, key: str) -> Any:
    if not isinstance(owner, dict) or key not in owner:
        raise JsonError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    return cast("Json", owner)[key]


def text_member(owner: Any, key: str) -> str:
    return text_of(member(owner, key), key)


def array_member(owner: Any, key: str) -> list[Any]:
    return array_of(member(owner, key), key)


def text_of(value: Any, key: str | None = None) -> str:
    """A value that must be a text. key: of its member; None where the errors of Triton do not name it"""
    if not isinstance(value, str):
        raise _other_type(key, "parse", "string")
    return value


def array_of(value: Any, key: str) -> list[Any]:
    if isinstance(value, LongArray):
        if value.values > VALUES_MAX:
            raise _too_many_values()
        value = value.whole()
    if not isinstance(value, list):
        raise _other_type(key, "parse", "array")
    return cast("list[Any]", value)


def unsigned_of(value: Any, key: str | None = None, *, verb: str = "parse") -> int:
    """A value that must be an integer from 0 to 2**64 - 1. key: as in `text_of`"""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise _other_type(key, verb, "unsigned-integer")
    return value


def bool_of(value: Any, key: str, *, verb: str = "parse") -> bool:
    if type(value) is not bool:
        raise _other_type(key, verb, "boolean")
    return value


def _other_type(key: str | None, verb: str, wanted: str) -> JsonError:
    about = "" if key is None else f"Unable to {verb} '{key}': "
    return JsonError(f"{about}attempt to access JSON non-{wanted} as {wanted}")
