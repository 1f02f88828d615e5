"""Text and JSON to the extended configuration message. Syntax and types only: meaning is decided elsewhere.

Source: triton-spec section 4 ("pbtxt", "load-time JSON config"); protobuf's own parsers do the work.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from shared.configuration.lenient_json import as_strict_json
from shared.configuration.schema import CONFIG_DESCRIPTOR, POOL, ConfigMessage, new_config
from shared.contract.errors import ConfigError

CONFIG_BYTES_MAX = 1 << 20
"""Longest configuration read, bytes (text or JSON). Real ones have a few kilobytes; a load request may be anything."""

_POSITION = re.compile(r"^\d+:\d+ : ")
_NO_VALUE = re.compile(
    r'Enum type "(?P<text>[\w.]+)" has no value named |Invalid enum value .* for enum type (?P<json>[\w.]+)'
)
_NO_TEXT = re.compile(r"Expected string but found: '\w+'$")
_NO_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_LEXEME = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""")
"""A comment or a string of the text format. What stands in one says nothing about the other."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("abfnrtv\\?'\"01234567xXuU")
_BOOLS = {**dict.fromkeys(("true", "t", "yes", "y", "1"), True), **dict.fromkeys(("false", "f", "no", "n", "0"), False)}
"""The texts that protobuf's C++ parser takes for a bool in JSON, in any case."""


def parse_text(text: str, source: str) -> ConfigMessage:
    """A configuration in protobuf's text format.

    text    as the file has it; bytes that are no UTF-8 as `surrogateescape` decodes them, for which comments have room
    source  name of the file, for the message
    raises  ConfigError naming file, line, column and what was wrong there
    """
    _check_length(text, source)
    config = new_config()
    try:
        text_format.Parse(_as_python_reads_text(text, source), config)
    except text_format.ParseError as error:
        what = _POSITION.sub("", str(error))
        line, column = error.GetLine(), error.GetColumn()
        where = f"{source}:{line}:{column}" if line is not None else source
        raise ConfigError(f"failed to read text proto from {where}: {what}{_remedy(what)}") from error
    except ValueError as error:
        # Of the number of an enum's value protobuf does not say where it stands.
        raise ConfigError(f"failed to read text proto from {source}: {error}") from error
    return config


def _as_python_reads_text(text: str, source: str) -> str:
    """The same text for protobuf's Python parser, without comments. Of an escape that it does not know it would keep
    the backslash: there is one that C has (of the question mark), and any other is a mistake.
    """

    def lexeme(found: re.Match[str]) -> str:
        def escape(inner: re.Match[str]) -> str:
            if inner[1] not in _ESCAPES:
                where = _where(text, found.start() + inner.start(), source)
                raise ConfigError(f"failed to read text proto from {where}: Invalid escape sequence in string literal.")
            return "?" if inner[1] == "?" else inner.group()

        return "" if found.group().startswith("#") else _ESCAPE.sub(escape, found.group())

    read = _LEXEME.sub(lexeme, text)
    try:
        read.encode()
    except UnicodeEncodeError as error:
        # Lines are as long as before, up to their comments.
        where = _where(read, error.start, source)
        raise ConfigError(f"failed to read text proto from {where}: it is no UTF-8") from error
    return read


def _where(text: str, at: int, source: str) -> str:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"{source}:{line}:{column}"


def _remedy(what: str) -> str:
    """What may have been meant, for the mistakes that are made most; "" for others."""
    if found := _NO_VALUE.search(what):
        values = POOL.FindEnumTypeByName(found["text"] or found["json"]).values_by_name
        return f" There are: {', '.join(name for name in values if name != 'TYPE_INVALID')}."
    if found := _NO_FIELD.search(what):
        fields = POOL.FindMessageTypeByName(found[1]).fields_by_name
        return "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(found[2], list(fields), n=1))
    return ": texts stand in quotes" if _NO_TEXT.search(what) else ""


def parse_json(text: str, source: str = "model configuration JSON") -> ConfigMessage:
    """A configuration in Triton's JSON: names of enum values in any case, unknown fields and repeated keys refused. An
    element without brackets is a list of one.

    Bare keys, single quotes and trailing commas are read as well (`shared.configuration.lenient_json`).

    raises  ConfigError with what was wrong
    """
    _check_length(text, source)
    try:
        fields: object = _loaded(text)
        if not isinstance(fields, dict):
            raise ConfigError(f"failed to parse {source}: expected a JSON object")
        # Half a surrogate pair is no text: protobuf, asked for a field of that name, raises SystemError.
        json.dumps(fields, ensure_ascii=False).encode()
        strict = _as_python_reads(cast("dict[str, Any]", fields), CONFIG_DESCRIPTOR)
        return json_format.ParseDict(strict, new_config(), descriptor_pool=POOL)
    except (ArithmeticError, ValueError, TypeError, RecursionError, json_format.ParseError) as error:
        # Beside its own ParseError, json_format lets these through for values of odd types and sizes. A list of fields
        # in names that Triton's files do not use stands in further lines.
        what = str(error).partition("\n")[0].rstrip(".")
        remedy = _remedy(what)
        raise ConfigError(f"failed to parse {source}: {what}{remedy and '.'}{remedy}") from error


def _loaded(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError:
        return json.loads(as_strict_json(text), object_pairs_hook=_without_repeats)


def _check_length(text: str, source: str) -> None:
    if len(text) > CONFIG_BYTES_MAX:
        raise ConfigError(f"failed to read {source}: longer than {CONFIG_BYTES_MAX} bytes")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"repeated key {', '.join(repeated)}")
    return fields


def _as_python_reads(fields: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """The same JSON as protobuf's Python parser takes it, which is stricter than its C++ parser: names of enum values
    in upper case with underscores, as all of this schema's are, lists in brackets, and bools that are no texts.
    """
    known = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    return {key: _member(value, known[key]) if key in known else value for key, value in fields.items()}


def _member(value: Any, field: FieldDescriptor) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        if not isinstance(value, dict):
            return value
        entry = message.fields_by_name["value"]
        return {key: _member(one, entry) for key, one in cast("dict[str, Any]", value).items()}
    if not field.is_repeated or value is None:
        return _element(value, field)
    elements = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [_element(element, field) for element in elements]


def _element(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        # Python's parser takes an empty one for a message.
        raise TypeError(f"'{field.name}' has a list where one value is expected")
    if field.enum_type is not None:
        return _enum_value(value, field)
    if field.type == FieldDescriptor.TYPE_BOOL and isinstance(value, str):
        return _BOOLS.get(value.lower(), value)
    if field.message_type is None or not isinstance(value, dict):
        return value
    return _as_python_reads(cast("dict[str, Any]", value), field.message_type)


def _enum_value(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        # Python's parser takes the whole part of either.
        raise TypeError(f"'{field.name}' has {json.dumps(value)} where a name or a whole number is expected")
    return value.upper().replace("-", "_") if isinstance(value, str) else value
