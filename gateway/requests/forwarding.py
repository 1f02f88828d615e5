"""Headers (HTTP) and metadata (gRPC) that an operator wants to reach the model, as parameters of its requests. Pure.

Source: triton-spec 5.3, header forwarding.
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
    """The headers whose names the pattern finds. Names are as servers see them: lower case.

    raises  RequestError for a name that means something as a parameter
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        if not pattern.search(name):
            continue
        if name in RESERVED or name.startswith(RESERVED_PREFIX):
            raise RequestError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        found[name] = value
    return found
