"""Forwards HTTP headers and gRPC metadata to the model, as parameters of the request. Pure.

The operator chooses the names by a pattern. Source: triton-spec 5.3, header forwarding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shared.contract.errors import RequestError

RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
RESERVED_PREFIX = "triton_"


def forwarded(pairs: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, str]:
    """The headers whose names match the pattern.

    pairs   names and values; names in lower case, as both servers give them
    raises  RequestError for a name that already has a meaning as a parameter
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        if not pattern.search(name):
            continue
        if name in RESERVED or name.startswith(RESERVED_PREFIX):
            raise RequestError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        found[name] = value
    return found
