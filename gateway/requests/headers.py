"""What headers of HTTP and metadata of gRPC have in common. Pure."""

from __future__ import annotations

from typing import TypeVar

from shared.contract.errors import RequestError

T = TypeVar("T", int, str)


def only_value(what: str, value: T, before: T | None) -> T:
    """The value of something that a request may say once. Raises RequestError if it says something else, too.

    before  what it has said already, as by the client and by a proxy
    """
    if before not in (None, value):
        raise RequestError(f"the {what} has two values, '{before}' and '{value}': send one")
    return value
