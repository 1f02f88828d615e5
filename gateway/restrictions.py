"""Which parts of the protocol answer only to those who know a header. Pure; source: triton-spec 5.2, Triton's options.

An operator closes, say, loading and unloading to ordinary clients: `model-repository:admin-key=secret`. Both protocols
have an option of their own of this form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CATEGORIES = frozenset(
    (
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
    )
)


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that opens a part of the protocol. key: lower case, as headers arrive."""

    key: str
    value: str


def parse_restrictions(texts: Iterable[str]) -> dict[str, Restriction]:
    """Category -> what opens it, from texts `<category>,<category>,...:<header>=<value>`.

    A text may also be cut at its commas (lists in the environment are): what has no `:` belongs to what follows.

    raises  ValueError for another form, an unknown category, and one that is restricted twice
    """
    restrictions: dict[str, Restriction] = {}
    pending: list[str] = []
    for text in texts:
        names, colon, header = text.partition(":")
        pending += [name.strip() for name in names.split(",")]
        if not colon:
            continue
        key, equals, value = header.partition("=")
        if not key.strip() or not equals or not value:
            raise ValueError(f"'{text}' must have the form <category>,<category>:<header>=<value>")
        for name in pending:
            if name not in CATEGORIES:
                raise ValueError(f"unknown category '{name}': use one of {', '.join(sorted(CATEGORIES))}")
            if name in restrictions:
                raise ValueError(f"category '{name}' is restricted twice")
            restrictions[name] = Restriction(key.strip().lower(), value)
        pending = []
    if pending:
        raise ValueError(f"'{','.join(pending)}' must be followed by :<header>=<value>")
    return restrictions
