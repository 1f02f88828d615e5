"""How the operators' commands write counts, times, sizes and tables. Pure."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence

from shared.contract.ids import CorrelationId


def counted(number: int, noun: str) -> str:
    """`1 sequence`, `2 sequences`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def clock(ms: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))
    except (ValueError, OverflowError, OSError):  # a damaged record may say anything
        return f"at no time of a calendar ({ms} ms)"


def duration(ms: int) -> str:
    """A time in its two largest units: 2d 3h, 5m 12s, 8.4s."""
    seconds = max(0, ms) / 1000
    if seconds < 60:
        return f"{seconds:.1f}s"
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    at = next(index for index, (_, size) in enumerate(units) if seconds >= size)
    (large, size), (small, part) = units[at : at + 2]
    return f"{int(seconds // size)}{large} {int(seconds % size // part)}{small}"


def size(number: int) -> str:
    """Bytes as people read them."""
    scaled = float(number)
    for unit in ("B", "KiB", "MiB"):
        if scaled < 1024:
            return f"{scaled:.0f} {unit}"
        scaled /= 1024
    return f"{scaled:.1f} GiB"


def id_text(correlation_id: CorrelationId) -> str:
    """An id as people read it. Ids are clients' own, and may hold whatever a terminal obeys.

    A text stands in quotes, with escapes, if it looks like a number, begins with a quote, or has characters or spaces
    that are not seen. So no two ids look the same.
    """
    if isinstance(correlation_id, int):
        return str(correlation_id)
    is_seen = correlation_id.isprintable() and all(correlation_id.split(" "))
    is_plain = is_seen and not correlation_id.isdecimal() and correlation_id[0] not in "'\""
    return correlation_id if is_plain else repr(correlation_id)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as lines, with the columns below each other."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text + " " * (width - cells(text)) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def cells(text: str) -> int:
    """Cells of a terminal that a text takes: letters of East Asia take two, marks above a letter none."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )
