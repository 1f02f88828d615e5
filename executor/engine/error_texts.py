"""What an error says of itself, also where its class is a model's or a library's own; and the names in one."""

from __future__ import annotations

from collections.abc import Iterable


def text_of_error(error: BaseException) -> str:
    """The text of an error, whatever comes of asking it."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - its `__str__` is somebody's code
        return "<its text cannot be made>"


def class_and_text(error: BaseException) -> str:
    """As Python writes an error: `ValueError: no number`."""
    return f"{type(error).__name__}: {text_of_error(error)}"


def quoted(names: Iterable[str]) -> str:
    """Names as an error lists them: 'one', 'two'; "" for none."""
    return ", ".join(f"'{name}'" for name in names)
