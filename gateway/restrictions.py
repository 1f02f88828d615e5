"""Parts of the protocols that answer only requests with a secret header. Pure.

An operator closes, for instance, loading and unloading to ordinary clients: `model-repository:admin-key=secret`. The
setting `--restricted-api` covers HTTP, gRPC and the metrics port; Triton's two settings cover one protocol each.

Source: triton-spec 5.2; Triton's options.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

METRICS = "metrics"
SEQUENCES = "sequences"
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
        SEQUENCES,
    )
)
"""Parts of the protocols by Triton's names, the page of metrics, and the routes about sequences."""
HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""What a client can send as a header's name (RFC 9110, 5.6.2)."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that a restricted part requires. key: in lower case, as headers arrive."""

    key: str
    value: str

    def is_met(self, given: Iterable[str | bytes]) -> bool:
        """Whether one of the values that a client gave for the key is the right one."""
        expected = self.value.encode()
        # No early exit and a constant-time comparison: the time taken must not tell how much of a guess was right.
        met = [hmac.compare_digest(one.encode() if isinstance(one, str) else one, expected) for one in given]
        return any(met)


def of_metrics(restrictions: Mapping[str, Restriction]) -> Restriction | None:
    """The restriction of the page of metrics: its own, or else that of the statistics, which the page shows too."""
    return restrictions.get(METRICS) or restrictions.get("statistics")


def parse_restrictions(texts: Iterable[str]) -> dict[str, Restriction]:
    """Parses texts `<category>,<category>,...:<header>=<value>` into category -> restriction.

    Lists in the environment are cut at their commas, also inside such a text. So a text without `:` is taken as the
    beginning of the next one.

    raises  ValueError for another form, a header that no client can send, an unknown category, and a category that is
            restricted twice
    """
    restrictions: dict[str, Restriction] = {}
    pending: list[str] = []
    for number, text in enumerate(texts, 1):
        names, colon, header = text.partition(":")
        pending += [name.strip() for name in names.split(",")]
        if not colon:
            continue
        key, equals, value = header.partition("=")
        key = key.strip()
        if not key or not equals or not value:
            raise _unclear(number, "it must have the form <category>,<category>:<header>=<value>")
        if not HEADER_NAME.fullmatch(key) or value != value.strip():
            raise _unclear(number, "no client can send its header: mind spaces, and other scripts")
        for name in pending:
            if name not in CATEGORIES:
                raise _unclear(number, f"it names an unknown category: use one of {', '.join(sorted(CATEGORIES))}")
            if name in restrictions:
                raise ValueError(f"category '{name}' is restricted twice")
            restrictions[name] = Restriction(key.lower(), value)
        pending = []
    if pending:
        raise ValueError("the last text must end with :<header>=<value>")
    return restrictions


def _unclear(number: int, problem: str) -> ValueError:
    """Shows nothing of the text: whatever of it is not understood may be a part of the secret, above all where the list
    was cut within it."""
    return ValueError(f"text {number}: {problem}")
