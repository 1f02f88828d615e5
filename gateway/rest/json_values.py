"""Reading JSON as Triton reads it: by member, with the words and the code of its JSON library. Pure.

What is wrong with a document's form is INTERNAL there, not INVALID_ARG: clients see 500. A value that should be an
object and is none has no members; that is no error by itself. Source: triton-spec 5.3; Triton 2.51 as it answers.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import orjson

from shared.contract.errors import Code, RequestError
from shared.contract.limits import JSON_NESTING_MAX

Json = dict[str, Any]
UINT64_MAX = (1 << 64) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
INTEGER_DIGITS_MAX = 20
LARGE_BYTES = 1 << 18
"""A document beyond this size is read without a tree of its own in between: orjson's takes 16 bytes for each value, on
top of the objects."""
NON_FINITE = (b"NaN", b"Inf")
"""What JSON has no number for; Triton reads it nevertheless, and Python's clients write it."""


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
}
"""What Triton's JSON library says where orjson says this."""


class JsonError(RequestError):
    """A document, or a value in it, that is not what it must be."""

    code = Code.INTERNAL


class Missing:
    """The value of a member that is not there."""


MISSING = Missing()


def parse(text: bytes) -> Any:
    """The document. Raises JsonError that says where it is broken, RequestError when it is nested too deeply."""
    document = _parse_large(text) if len(text) > LARGE_BYTES else None
    try:
        document = orjson.loads(text) if document is None else document
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:
            raise nesting_error() from error
        if not any(word in text for word in NON_FINITE):
            raise _broken(TRITONS_WORDS.get(error.msg, error.msg), error.pos) from error
        document = _parse_non_finite(text)
    if text.count(b"[") + text.count(b"{") > JSON_NESTING_MAX:
        check_depth(document)
    return document


def parsing_bytes(text: bytes) -> int:
    """What the values of a document take at most, besides its text: a number 32 bytes and its place in an array 8, an
    empty array 56, a string 56, an object 64 and 184 with a member; of letters beyond Latin-1 up to four bytes each."""
    places = text.count(b",") * 64 + text.count(b"[") * 72 + text.count(b"{") * 256
    return places if text.isascii() else places + 3 * len(text)


def parse_object(text: bytes) -> Json:
    """The document's members; none for a document that is no object."""
    return object_of(parse(text))


def _parse_large(text: bytes) -> Any:
    """The document, where nothing is wrong with it; integers beyond 64 bits stay integers here."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # What is wrong, and whether it is to Triton, the other parser says.
        return None


def _parse_non_finite(text: bytes) -> Any:
    """Numbers like `NaN` and `-Infinity` are understood here; slower, and so only used where they may be."""
    try:
        document = json.loads(text.decode(), parse_int=_integer)
        if b"\\u" in text:
            # Half a surrogate pair is a string to Python, and nothing that could be sent on.
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except json.JSONDecodeError as error:
        raise _broken(error.msg, error.pos) from error
    except UnicodeError as error:
        raise _broken("invalid encoding in string", getattr(error, "start", 0)) from error
    except RecursionError as error:
        raise nesting_error() from error


def _integer(digits: str) -> int | float:
    """An integer of 64 bits, or else a double, as orjson reads them."""
    return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else float(digits)


def _broken(what: str, position: int) -> JsonError:
    return JsonError(f"failed to parse the request JSON buffer: {what} at {position}")


def nesting_error() -> RequestError:
    """JSON that is nested too deeply."""
    return RequestError(f"JSON nesting depth exceeds maximum allowed limit ({JSON_NESTING_MAX})")


def check_depth(document: Any) -> None:
    """Refuses nesting beyond the limit; level by level, so that it needs no stack of its own."""
    level: list[Any] = [document] if isinstance(document, (list, dict)) else []
    for _ in range(JSON_NESTING_MAX):
        inner: list[Any] = []
        for value in level:
            items = cast("Json", value).values() if isinstance(value, dict) else value
            inner += [item for item in items if isinstance(item, (list, dict))]
        if not inner:
            return
        level = inner
    raise nesting_error()


# -- members --------------------------------------------------------------------------------------------------------


def object_of(value: Any) -> Json:
    """The value's members; none when it is no object."""
    return cast("Json", value) if isinstance(value, dict) else {}


def members(value: Any, where: str = "") -> Json:
    """The members of a value that must be an object. where: how the message begins."""
    if not isinstance(value, dict):
        raise JsonError(f"{where}attempt to get members for non-object")
    return cast("Json", value)


def member(owner: Any, key: str) -> Any:
    """A member that must be there."""
    value = object_of(owner).get(key, MISSING)
    if value is MISSING:
        raise JsonError(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    return value


def text_member(owner: Any, key: str) -> str:
    """A member that must be there and a string."""
    return text_of(member(owner, key), key)


def array_member(owner: Any, key: str) -> list[Any]:
    """A member that must be there and an array."""
    return array_of(member(owner, key), key)


def text_of(value: Any, key: str) -> str:
    """A value that must be a string."""
    if not isinstance(value, str):
        raise JsonError(f"Unable to parse '{key}': attempt to access JSON non-string as string")
    return value


def array_of(value: Any, key: str) -> list[Any]:
    """A value that must be an array."""
    if not isinstance(value, list):
        raise JsonError(f"Unable to parse '{key}': attempt to access JSON non-array as array")
    return cast("list[Any]", value)


def unsigned_of(value: Any, key: str, *, verb: str = "parse") -> int:
    """A value that must be an integer from 0 to 2**64 - 1."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise JsonError(f"Unable to {verb} '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def bool_of(value: Any, key: str, *, verb: str = "parse") -> bool:
    """A value that must be true or false."""
    if type(value) is not bool:
        raise JsonError(f"Unable to {verb} '{key}': attempt to access JSON non-boolean as boolean")
    return value
