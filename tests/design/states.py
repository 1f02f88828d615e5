"""The states that docs/design/sequence-states.md draws: from the tables of the code where there is one.

What the scripts do to a record stands in no table there, so it stands here, and tests hold it against the names in the
scripts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from executor.core.state import OWNED_MOVES
from scheduler.core.state import EXECUTOR_MOVES, SEQUENCE_MOVES

Phase = TypeVar("Phase", bound=str)

Edges = Mapping[tuple[str, str], tuple[str, ...]]
"""(from, to) -> the moves that lead there, by name."""


def edges(moves: Iterable[tuple[str, str, str]]) -> Edges:
    """Moves (from, name, to), those between the same two states together."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for before, move, after in moves:
        found[before, after].append(move)
    return {ends: tuple(sorted(names)) for ends, names in found.items()}


def table_moves(table: Mapping[tuple[Phase, str], Phase]) -> list[tuple[str, str, str]]:
    """The moves of a table of one of the cores."""
    return [(str(before), move, str(after)) for (before, move), after in table.items()]


NONE, OVER = "none", "over"
RECORD_MOVES = (
    (NONE, "submit", "w"),
    (OVER, "submit", "w"),
    (NONE, "submit", "l"),
    (OVER, "submit", "l"),
    ("w", "assign", "l"),
    ("m", "assign", "l"),
    ("w", "cancel", NONE),
    ("w", "reject", NONE),
    ("m", "reject", NONE),
    ("l", "commit", "p"),
    ("l", "page", "p"),
    ("l", "vacate", "p"),
    ("l", "reclaim", "p"),
    ("l", "vacate", "m"),
    ("l", "reclaim", "m"),
    ("p", "submit", "m"),
    ("p", "submit", "l"),
    ("p", "vacate", "m"),
    ("l", "pause", "m"),
    ("p", "pause", "m"),
    ("m", "resume", "p"),
    ("l", "commit", OVER),
    ("l", "reclaim", OVER),
    ("l", "reload", OVER),
    ("l", "lose", OVER),
    ("m", "reject", OVER),
    ("l", "expire", OVER),
    ("p", "expire", OVER),
    ("m", "expire", OVER),
    (OVER, "TTL", NONE),
)
"""(field `st` of a record, script, field `st` after it); OVER stands for each of the five tombstones."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A diagram of states.

    labels  what a state is called in the diagram, where that is more than its name
    sinks   states that are drawn twice, at the beginning and at the end, so that lines do not cross
    back    edges that do not say which of two states stands above the other
    """

    name: str
    title: str
    edges: Edges
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    sinks: frozenset[str] = frozenset()
    back: frozenset[tuple[str, str]] = frozenset()
    rankdir: str = "TB"


DRAWINGS = (
    Drawing(
        "sequence-states",
        "The phases of a sequence as its leader sees them",
        edges(table_moves(SEQUENCE_MOVES)),
        sinks=frozenset({"absent"}),
    ),
    Drawing(
        "executor-states",
        "The phases of an executor as a model's leader sees them",
        edges(table_moves(EXECUTOR_MOVES)),
        rankdir="LR",
    ),
    Drawing(
        "record-states",
        "The states of a sequence's record in Redis, and the scripts that change them",
        edges(RECORD_MOVES),
        labels={
            NONE: "no record",
            "w": "w waiting",
            "m": "m moving",
            "l": "l live",
            "p": "p paged",
            OVER: "over: e ended, x expired,\\nf failed, o lost, c cancelled",
        },
        sinks=frozenset({NONE}),
        back=frozenset({(OVER, "w"), (OVER, "l"), ("m", "l"), ("p", "l")}),
    ),
    Drawing(
        "owned-states",
        "The phases of a sequence at the executor that owns it",
        edges(table_moves(OWNED_MOVES)),
        sinks=frozenset({"absent"}),
    ),
)

COPY = "_again"
"""A sink's second node: its name and this."""


def read_edges(svg: str) -> Edges:
    """The edges of a drawn diagram, as `edges` gives them."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for group in re.findall(r'<g id="[^"]*" class="edge">(.*?)</g>\n', svg, re.DOTALL):
        title = re.search(r"<title>(.*?)</title>", group)
        assert title is not None, group
        before, _, after = title[1].replace("&#45;&gt;", "->").partition("->")
        words = tuple(sorted(re.findall(r"<text[^>]*>(.*?)</text>", group)))
        found[before.removesuffix(COPY), after.removesuffix(COPY)] = words
    return found
