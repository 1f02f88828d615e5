"""JSON as protobuf's C++ parser takes it, by which Triton reads a load request's configuration; Python's reads less.

Beyond JSON it takes keys without quotes, strings in single quotes, a comma after the last member or element, escapes
that JSON does not know, and control characters in strings. Source: protobuf, json_stream_parser.cc, in later releases
json/internal/lexer.cc.
"""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_$][\w$]*)"""
    r"""|(?P<number>-?[0-9][0-9.eE+-]*)|(?P<mark>[{}\[\]:,])""",
    re.DOTALL | re.ASCII,
)
_IN_STRING = re.compile(r"""\\(?P<escaped>.)|(?P<plain>["\x00-\x1f])""", re.DOTALL)
_KEYWORDS = frozenset(("true", "false", "null"))
_KNOWN_ESCAPES = frozenset('"\\/bfnrtu')


def as_strict_json(text: str) -> str:
    """The same document in JSON's own syntax.

    What the lenient parser refuses too is left as it is, for the strict parser to name.

    raises  ValueError for a character that begins nothing, by its line and column
    """
    tokens: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise json.JSONDecodeError("Unexpected character", text, at)
        kind = found.lastgroup or ""
        if kind != "space":
            tokens.append((kind, found.group()))
        at = found.end()
    written: list[str] = []
    for index, (kind, part) in enumerate(tokens):
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        # A comma needs something before it, also in the lenient form.
        if part == "," and following in ("}", "]") and tokens[index - 1][1] not in ("{", "[", ","):
            continue
        if kind == "string":
            written.append(f'"{_IN_STRING.sub(_in_json, part[1:-1])}"')
        elif kind == "word" and following == ":" and part not in _KEYWORDS:
            written.append(f'"{part}"')
        else:
            written.append(part)
    return " ".join(written)


def _in_json(part: re.Match[str]) -> str:
    """One escape, or one character that JSON wants escaped, as JSON writes it."""
    escaped = part["escaped"]
    if escaped is None:
        return json.dumps(part["plain"])[1:-1]
    if escaped in _KNOWN_ESCAPES:
        return part.group()
    # Any other escaped character stands for itself.
    return "\\u000b" if escaped == "v" else json.dumps(escaped)[1:-1]
