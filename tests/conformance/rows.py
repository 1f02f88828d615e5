"""The table of what Triton does: a row per field, endpoint, rpc, parameter, header, message, metric, option, variable,
function and rule.

The rows lie in `table/*.toml`, one file per subject, and are read by people as README.md (`python -m
tests.conformance.readme`). `test_table.py` holds every row against the code, so that the table cannot drift.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.symbols import parsed

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "table"
KINDS = (
    "field", "endpoint", "rpc", "parameter", "header", "message", "metric", "option", "variable", "function", "rule",
)  # fmt: skip
PLACEHOLDER = re.compile(r"\{[^{}]*\}")
WORD = re.compile(r"\w{3}")
HOLE = "\0"
TELLING_WORDS = 3
STRETCH = 16
"""Characters of a message that say which it is."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that Triton has.

    kind     one of `KINDS`
    name     of a field, rpc, ...: as Triton writes it; of an endpoint: its methods and path, with [optional] parts;
             of a message: its text, with {placeholders}
    section  of docs/triton ("triton-spec" in docstrings) that says so; `dialect`: docs/triton/dialect.md
    does     what the mesh does, in a few words
    where    `path:symbol` of the code that handles it; symbol as `function`, `Class`, `Class.method` or `NAME`
    tests    `path::test` that show it
    refused  why a mesh cannot mean it, or not yet; then `where` refuses it and `tests` show the refusal
    differs  how and why the mesh deliberately does something else
    """

    kind: str
    name: str
    section: str
    does: str
    where: tuple[str, ...]
    tests: tuple[str, ...]
    refused: str = ""
    differs: str = ""


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rows. title: as people read it."""

    title: str
    row: tuple[Row, ...]


@functools.cache
def subjects() -> dict[str, Subject]:
    """All rows by the name of their file. Raises msgspec.ValidationError for a row with a word that no row has."""
    return {path.stem: msgspec.toml.decode(path.read_bytes(), type=Subject) for path in sorted(TABLE.glob("*.toml"))}


def all_rows() -> tuple[Row, ...]:
    """The rows of all subjects."""
    return tuple(row for subject in subjects().values() for row in subject.row)


@functools.cache
def literals(path: Path) -> str:
    """The string literals of one Python file, one a line: implicit concatenation joined, a hole where a value is put
    in. Of another file its text."""
    if path.suffix != ".py":
        return path.read_text()
    found: list[str] = []
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Constant(value=str(text)):
                found.append(PLACEHOLDER.sub(HOLE, text))
            case ast.Constant(value=bytes(raw)):
                found.append(raw.decode(errors="replace"))
            case ast.JoinedStr(values=values):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in values))
            case _:
                pass
    return "\n".join(found)


def texts(places: Iterable[str], separator: str) -> list[str]:
    """The literals of the files of `where` or `tests`, without the backslashes of regular expressions."""
    paths = {ROOT / place.partition(separator)[0] for place in places}
    return [literals(path).replace("\\", "") for path in sorted(paths) if path.is_file()]


def pieces(row: Row) -> list[str]:
    """A message's text between its placeholders; pieces without a word (brackets, commas) are not looked for."""
    return [piece.strip() for piece in PLACEHOLDER.split(row.name) if WORD.search(piece)]


def unsaid(row: Row) -> list[str]:
    """The pieces of a message that stand neither in the files that are to say it nor in its tests.

    A message that the code puts together, so that a piece is in parts there, is found by the literal with holes that
    could have made it.
    """
    known = texts(row.where, ":") + texts(row.tests, "::")
    missing = [piece for piece in pieces(row) if not any(piece in text for text in known)]
    whole = PLACEHOLDER.sub("x", row.name)
    return missing if missing and not any(could_say(text, whole) for text in known) else []


def is_compared(row: Row) -> bool:
    """Whether some stretch of a message stands in a file of its tests."""
    shown = texts(row.tests, "::")
    stretches = {piece[i : i + STRETCH] for piece in pieces(row) for i in range(max(1, len(piece) - STRETCH + 1))}
    return any(stretch in text for stretch in stretches for text in shown)


def could_say(known: str, text: str) -> bool:
    """Whether a literal with holes could become this text; one of fewer than three words could become anything."""
    return any(
        re.fullmatch(".+?".join(map(re.escape, parts)), text)
        for parts in (line.split(HOLE) for line in known.split("\n") if HOLE in line)
        if all(part in text for part in parts) and len(WORD.findall(" ".join(parts))) >= TELLING_WORDS
    )
