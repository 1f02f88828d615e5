"""Texts that a `model.py` gives. They go on in messages, which take `str` itself alone.

An element of numpy's arrays of texts is of a subclass, and msgspec raises for one.
"""

from __future__ import annotations

from typing import TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string that UTF-8 can encode: half a surrogate pair it cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def plain_text(value: object) -> str:
    """The value as a text of Python's own type."""
    return str.__str__(str(value))
