"""docs/reference/keys.md as data: the kinds of keys, a record's states and fields, and the kinds of stream entries."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shared.store.keyspace import kind_of
from tests.markdown_pages import table_rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "keys.md"


class KeyKind(NamedTuple):
    """A row of the table of keys."""

    key: str
    type: str
    lifetime: str
    holds: str
    writers: str
    readers: str


class RecordField(NamedTuple):
    """A row of the table of a record's fields. Behind a name with a colon follows a step's number."""

    name: str
    type: str
    meaning: str
    writers: str
    absent: str


def _tables(heading: str) -> list[list[str]]:
    """The rows of every table between a heading (all of its `#` included) and the next one."""
    _, found, below = PAGE.read_text().partition(f"\n{heading}\n")
    assert found, f"no {heading!r} in {PAGE.name}"
    return table_rows(below.partition("\n#")[0])


KINDS = {kind_of(key.strip("`")): KeyKind(key.strip("`"), *cells) for key, *cells in _tables("## Keys")}
"""By the kind's name (`kind_of`), in the order of the page."""
PERMANENT = {kind for kind, about in KINDS.items() if about.lifetime.startswith("permanent")}
"""Kinds of keys without a TTL: counters and small tables, and streams that are emptied."""
SEQUENCE_BOUND = {kind for kind, about in KINDS.items() if about.lifetime.startswith("sequence")}
"""Kinds of keys without a TTL while a sequence lives."""
_RECORD = _tables("## The record of a sequence")
STATES = {cells[0].strip("`").encode() for cells in _RECORD if len(cells) == 2}
FIELDS = [RecordField(name.strip("`").removesuffix("<step>"), *cells) for name, *cells in _RECORD if len(cells) == 4]
ENTRY_KINDS = {
    cells[0].strip("`")
    for stream in ("### Inboxes", "### The starts streams", "### The feeds")
    for cells in _tables(stream)
    if len(cells) == 2
}
