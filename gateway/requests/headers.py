"""What headers of HTTP and metadata of gRPC have in common. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from shared.contract.errors import RequestError

T = TypeVar("T", int, str)

RESERVED = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"),
        *("sequence_step", "sequence_answer", "sequence_run_info", "sequence_close"),
        *("sequence_wait_info", "sequence_wait_max_ms"),
    )
)
"""Triton's, and the mesh's own: who sends one of these as a header takes it for heard."""
RESERVED_PREFIX = "triton_"


def only_value(what: str, value: T, before: T | None) -> T:
    """The value of something that a request may say once. Raises RequestError if it says something else, too.

    before  what it has said already, as by the client and by a proxy
    """
    if before not in (None, value):
        raise RequestError(f"the {what} has two values, '{before}' and '{value}': send one")
    return value


def forwarded(pairs: Iterable[tuple[str, str]], pattern: re.Pattern[str]) -> dict[str, str]:
    """The headers that go to the model as parameters of the request: the operator's pattern matches their names.

    pairs   names and values; names in lower case, as both servers give them
    raises  RequestError for a name that already has a meaning as a parameter
    source  triton-spec 5.3, header forwarding
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        if not pattern.search(name):
            continue
        if name in RESERVED or name.startswith(RESERVED_PREFIX):
            raise RequestError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        found[name] = value
    return found
