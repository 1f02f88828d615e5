"""Which parts of the protocols answer only to those who know a header. Pure; source: triton-spec 5.2, Triton's options.

An operator closes, say, loading and unloading to ordinary clients: `model-repository:admin-key=secret`. One setting
covers HTTP, gRPC and the metrics port (`--restricted-api`); Triton's two close a part of one protocol alone.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

METRICS = "metrics"
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
        METRICS,
    )
)
"""Parts of the protocol, as Triton names them, and the page of metrics."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that opens a part of the protocol. key: lower case, as headers arrive."""

    key: str
    value: str

    def is_met(self, given: Iterable[str | bytes]) -> bool:
        """Whether one of the values that a caller gave for the key is the right one. How long that takes says nothing
        of how much of it was right."""
        expected = self.value.encode()
        met = [hmac.compare_digest(one.encode() if isinstance(one, str) else one, expected) for one in given]
        return any(met)


def of_metrics(restrictions: Mapping[str, Restriction]) -> Restriction | None:
    """What opens the page of metrics: its own restriction, or else that of the statistics, which it shows as well."""
    return restrictions.get(METRICS) or restrictions.get("statistics")


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
