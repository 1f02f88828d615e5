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


def text_of_error(error: BaseException) -> str:
    """The text of an error whose class may be the model's own."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - its `__str__` is the model's code
        return "<its text cannot be made>"


def class_and_text(error: BaseException) -> str:
    """As Python writes an error: `ValueError: no number`. Also of one whose class is the model's own."""
    return f"{type(error).__name__}: {text_of_error(error)}"
