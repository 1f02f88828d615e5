"""Reads JSON as Triton does: by member, with the error texts and codes of Triton's JSON library. Pure.

In Triton a malformed document is INTERNAL, not INVALID_ARG, so clients see status 500. A value that should be an object
and is not counts as an object without members, which is no error by itself. Source: triton-spec 5.3; observed answers
of Triton 2.51.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import numpy as np
import orjson

from shared.contract.errors import Code, RequestError
from shared.contract.limits import JSON_NESTING_MAX
from shared.contract.parameters import UINT64_MAX
from shared.process import collector

Json = dict[str, Any]
INTEGER_DIGITS_MAX = 20
LARGE_BYTES = 1 << 18
"""Beyond this size a document is not parsed by orjson, which builds a tree of its own before the Python objects: 16
more bytes per value."""
EXPONENTS_MAX = 10_000
"""A large document with more numbers like `5e-324` is read in another way: for one of them msgspec may take 15 us, in
which no other thread runs, 7 s for 6 MB."""
NUMBER_BY_NUMBER = msgspec.json.Decoder[Any](float_hook=orjson.loads)
"""Leaves numbers to orjson: 0.2 us for each, of whatever kind, where msgspec takes 0.1 us for the usual ones."""
MEMBERS_MAX = 100_000
"""Members of all objects of a document. Each that is new takes 1 us, in which no other thread runs: 8 s for 64 MiB."""
PIECE_BYTES = 1 << 20
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
    """Parses a document.

    raises  JsonError with the position of the mistake, RequestError for too deep nesting and for too many members
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    document = None
    if len(text) > LARGE_BYTES:
        check_members(text)
        document = _parse_large(text)
    try:
        document = orjson.loads(text) if document is None else document
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:
            raise nesting_error() from error
        if not error.msg.startswith(NOT_UTF8) and not any(word in text for word in NON_FINITE):
            raise _broken(TRITONS_WORDS.get(error.msg, error.msg), error.pos) from error
        document = _parse_non_finite(text)
    if text.count(b"[") + text.count(b"{") > JSON_NESTING_MAX:
        check_depth(document)
    return document


def parsing_bytes(text: bytes) -> int:
    """The most memory, in bytes, that the parsed values of a document take besides its text.

    A number takes 32 and its slot in an array 8; an empty array 56; a string 56; an object 64, with a member 184; a
    letter beyond Latin-1 up to 4. A further member takes 110 besides its value, but there are only MEMBERS_MAX.
    """
    places = text.count(b",") * 64 + text.count(b"[") * 72 + text.count(b"{") * 256
    return places if text.isascii() else places + 3 * len(text)


def parse_object(text: bytes) -> Json:
    """Parses a document and returns its members; none for a document that is no object."""
    return object_of(parse(text))


def check_members(text: bytes) -> None:
    """Refuses a document whose objects have too many members: colons that are in no string. Lets other threads run."""
    if text.count(b":") <= MEMBERS_MAX:
        return
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, within = 0, np.False_
    for begin in range(0, len(text), PIECE_BYTES):
        piece = np.frombuffer(text, np.uint8, min(PIECE_BYTES, len(text) - begin), begin)
        in_strings = np.logical_xor.accumulate(piece == ord('"')) ^ within
        within = in_strings[-1]
        count += np.count_nonzero((piece == ord(":")) & ~in_strings)
        if count > MEMBERS_MAX:
            raise RequestError(f"the objects of a request in JSON may have {MEMBERS_MAX} members together, not more")


def _parse_large(text: bytes) -> Any:
    """Parses a valid large document; None for a broken one. Unlike orjson it keeps integers beyond 64 bits."""
    exponents = text.count(b"e") + text.count(b"E")
    try:
        with collector.at_rest():
            return msgspec.json.decode(text) if exponents <= EXPONENTS_MAX else NUMBER_BY_NUMBER.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # The caller then uses the other parser, which says what is wrong, or accepts it as Triton does.
        return None


def _parse_non_finite(text: bytes) -> Any:
    """Parses a document that may have numbers like `NaN` and `-Infinity`. Slower, so used only for such a document."""
    try:
        with collector.at_rest():
            document = json.loads(text.decode(), parse_int=_integer)
        if b"\\u" in text:
            # Python accepts a lone surrogate in a string, but it cannot be encoded. Encoding raises here, on purpose.
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except json.JSONDecodeError as error:
        raise _broken(error.msg, error.pos) from error
    except UnicodeError as error:
        raise _broken("Invalid encoding in string.", getattr(error, "start", 0)) from error
    except RecursionError as error:
        raise nesting_error() from error


def _integer(digits: str) -> int | float:
    """Reads an integer as orjson does: one beyond 64 bits becomes a double."""
    return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else float(digits)


def _broken(what: str, position: int) -> JsonError:
    return JsonError(f"failed to parse the request JSON buffer: {what} at {position}")


def nesting_error() -> RequestError:
    return RequestError(f"JSON nesting depth exceeds maximum allowed limit ({JSON_NESTING_MAX})")


def check_depth(document: Any) -> None:
    """Refuses nesting beyond the limit. Goes level by level instead of recursing, so that it needs no deep stack."""
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


def unsigned_member(owner: Any, key: str) -> int:
    return unsigned_of(member(owner, key), key)


def array_member(owner: Any, key: str) -> list[Any]:
    return array_of(member(owner, key), key)


def text_of(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise JsonError(f"Unable to parse '{key}': attempt to access JSON non-string as string")
    return value


def array_of(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise JsonError(f"Unable to parse '{key}': attempt to access JSON non-array as array")
    return cast("list[Any]", value)


def unsigned_of(value: Any, key: str, *, verb: str = "parse") -> int:
    """A value that must be an integer from 0 to 2**64 - 1."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise JsonError(f"Unable to {verb} '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def bool_of(value: Any, key: str, *, verb: str = "parse") -> bool:
    if type(value) is not bool:
        raise JsonError(f"Unable to {verb} '{key}': attempt to access JSON non-boolean as boolean")
    return value
